"""Products that quack-kernels, which flash-attn-4 brings along, does faster on Hopper cards than torch: rows grouped by
expert, a wide head, and gate and up with SwiGLU on the way out. Each is tried once against torch before it is used.

Called by grouped_gemm.py, head_gradients.py and gate_up.py. R rows, D what is summed over, E experts, V vocab, W width.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from erniekit.kernels import broken
from erniekit.kernels.available import loaded
from erniekit.kernels.swiglu import pairs
from erniekit.kernels.swiglu import reference as swiglu
from erniekit.log import warn_once

PACKAGE = "quack-kernels"
APART = 0.02  # of two right results in bf16, relative
WIDE, MANY = 16384, 1024  # columns and rows from which a head's logits are faster: 5 to 9 %

Trial = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]  # what came out, and what should have


@functools.cache
def library() -> Any:
    """Its module, or None where it is not installed or does not load."""
    return loaded("quack.gemm_interface", "gemm", "gemm_act", package=PACKAGE)


@functools.cache
def why_not(what: str, device: torch.device) -> str | None:
    """Why it does not compute `what` (a key of TRIALS) on this device; None: it does, and agrees with torch."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "for Hopper cards"
    if library() is None:
        return "quack-kernels is not installed"
    return None if agrees(what, lambda: TRIALS[what](device)) else "does not agree with torch here"


def agrees(what: str, trial: Trial) -> bool:
    """Prints a line where it does not."""
    try:
        far = float(torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(*trial())]).max())
    except Exception as problem:
        broken.report(PACKAGE, cause(problem))
        return False
    if not far <= APART:
        warn_once(f"{what}: quack-kernels is off by {far:.1%} here and not used")
    return far <= APART


def cause(problem: Exception) -> Exception:
    """The error to report. quack-kernels keys an epilogue by its source and by all that this reaches, up to installed
    code, which it recognises by the name of a folder. Where cutlass lies elsewhere (`pip install --target`) it goes on
    into that, to an object that has no key, and its message does not name the folder."""
    cutlass = getattr(sys.modules.get("cutlass"), "__file__", None)
    if not cutlass or "semantic key" not in str(problem):
        return problem
    if {"site-packages", "dist-packages"} & set(Path(cutlass).parts):
        return problem
    error = ImportError(f"cutlass is not in a folder named site-packages\nbut {cutlass}")
    error.__cause__ = problem
    return error


def _draws(device: torch.device) -> Callable[..., torch.Tensor]:
    random = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=random, device=device).bfloat16()


def grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, D] sorted by expert, weight [E, D, W], ends int32 [E] -> [R, W]."""
    bounds = F.pad(ends, (1, 0))
    out: torch.Tensor = library().gemm(rows, weight, cu_seqlens_m=bounds, dynamic_scheduler=True, tuned=False)
    return out


def _try_grouped(device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """An expert has no row; weights as they lie and turned."""
    drawn = _draws(device)
    rows, weight = drawn(300, 128), drawn(4, 192, 128).transpose(1, 2)
    ends = torch.tensor([70, 70, 201, 300], dtype=torch.int32).to(device, non_blocking=True)
    results = [grouped(rows, weight, ends), grouped(rows, weight.contiguous(), ends)]
    return results, [F.grouped_mm(rows, weight, offs=ends)] * 2


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, D], weight [V, D] -> [R, V]."""
    out: torch.Tensor = library().gemm(x, weight.detach().t(), dynamic_scheduler=True, tuned=False)
    return out


def takes_logits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a wide head (selection.py) of these is faster so, and lies as it must."""
    large = x.shape[0] >= MANY and x.dtype == weight.dtype == torch.bfloat16
    return large and x.is_contiguous() and weight.is_contiguous() and type(weight) in (torch.Tensor, torch.nn.Parameter)


def _try_logits(device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    drawn = _draws(device)
    x, weight = drawn(300, 128), drawn(1024, 128)
    return [logits(x, weight)], [F.linear(x, weight)]


def gated(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, D], weight [2 W, D], gate's rows first -> SwiGLU [R, W], and gate and up in turn [R, 2 W]."""
    paired, act = library().gemm_act(x, weight.t(), activation="swiglu", tuned=False, concat_layout=("B",))
    return act, paired


def _try_gated(device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    drawn = _draws(device)
    x, weight = drawn(300, 128), drawn(512, 128) / 8
    halves = F.linear(x, weight)
    return list(gated(x, weight)), [swiglu(halves.float()), pairs(halves)]


TRIALS = {"experts": _try_grouped, "head": _try_logits, "feed-forward": _try_gated}
