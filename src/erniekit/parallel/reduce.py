"""Sums over ranks that may be on unlike devices: through host memory where the group's library supports no device.

Called for the few numbers that all ranks of a job share (losses, norms, loads), and for tied weights.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from erniekit.parallel import comm


def on_host(group: ProcessGroup) -> bool:
    """Whether a group carries tensors of the host only."""
    return comm.backend_of(group) == "gloo"


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None, op: str = "sum") -> None:
    """In place, with the same bits on every rank."""
    if group is None or tensor.device.type == "cpu" or not on_host(group):
        comm.all_reduce(tensor, group, op)
        return
    host = tensor.cpu()
    comm.all_reduce(host, group, op)
    tensor.copy_(host)
