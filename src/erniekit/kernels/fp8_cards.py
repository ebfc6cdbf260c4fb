"""Which cards multiply in fp8, and what they require of a weight. Used by kernels/stored and selection.py."""

from __future__ import annotations

import torch

from erniekit import capabilities

ALIGNED = 16  # widths of a weight are multiples of this: what the tensor cores' kernels load
OLDEST = (8, 9)  # NVIDIA's capability: the first with fp8
GROUPED = (9, 0)  # the only one whose grouped products torch has in fp8 with scales by row


def why_not(device: torch.device, experts: bool) -> str | None:
    """Why a device cannot do them; None: it can. A CPU runs the definition."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return "fp8 products run on NVIDIA cards (and, slowly, on a CPU)"
    if problem := capabilities.why_not("fp8"):
        return problem
    major, minor = capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"
    if capability < OLDEST:
        return f"{name} has no fp8; Hopper has, capability 9.0"
    if experts and capability != GROUPED:
        return f"this torch has fp8 products of experts for Hopper (capability 9.0) alone, not for {name}"
    absent = [op for op in ("_scaled_mm", "_scaled_grouped_mm") if not hasattr(torch, op)]
    return f"torch {torch.__version__} has no {absent[0]}" if absent else None
