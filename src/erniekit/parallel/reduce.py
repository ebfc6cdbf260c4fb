"""Sums over ranks that may be on unlike devices: through host memory where the group's library knows no device.

Called for the few numbers that all ranks of a job share (losses, norms, loads), and for tied weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def on_host(group: ProcessGroup) -> bool:
    """Whether a group carries tensors of the host alone."""
    return str(dist.get_backend(group)) == "gloo"


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> None:
    """In place, with the same bits on every rank."""
    if group is None or tensor.device.type == "cpu" or not on_host(group):
        dist.all_reduce(tensor, op=op, group=group)
        return
    host = tensor.cpu()
    dist.all_reduce(host, op=op, group=group)
    tensor.copy_(host)
