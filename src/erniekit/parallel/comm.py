"""Every collective and point-to-point call of erniekit: the only file that calls torch.distributed for them.

A thin layer: a test (tests/unit/test_named_backends.py) keeps all other files from calling torch.distributed for these,
so that a rehearsal sees each call with the line that made it. Places count inside the group, as its ranks are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_PROBE = 9_999  # tag of receives that only test a connection: no rank sends with it
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def rank_in(group: ProcessGroup | None = None) -> int:
    """This process's place in the group; None: among all ranks."""
    return dist.get_rank(group)


def size_of(group: ProcessGroup | None = None) -> int:
    return dist.get_world_size(group)


def backend_of(group: ProcessGroup) -> str:
    return str(dist.get_backend(group))


def new_group(
    ranks: Sequence[int] | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """All ranks must call it together, members or not. backend: of another kind than the default group's. A rehearsal
    rehearses every group, whatever would carry it."""
    backend = None if rehearsed(dist.group.WORLD) else backend
    group: ProcessGroup = dist.new_group(None if ranks is None else list(ranks), backend=backend, timeout=timeout)
    return group


def rehearsed(group: ProcessGroup | None) -> bool:
    """True in a rehearsal, where one process stands for all: calls are recorded and nothing travels."""
    return getattr(group, "rehearsed", False)


# --- tensors ---


def all_reduce(x: torch.Tensor, group: ProcessGroup | None = None, op: str = "sum") -> None:
    """In place."""
    dist.all_reduce(x, op=OPERATIONS[op], group=group)


def start_all_reduce(x: torch.Tensor, group: ProcessGroup | None = None) -> dist.Work:
    """A sum in place, while the caller goes on; `wait` on what is returned ends it."""
    work: dist.Work | None = dist.all_reduce(x, op=OPERATIONS["sum"], group=group, async_op=True)
    assert work is not None
    return work


def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: ProcessGroup | None = None) -> None:
    dist.all_gather(parts, x, group=group)


def reduce_scatter(out: torch.Tensor, parts: list[torch.Tensor], group: ProcessGroup | None = None) -> None:
    dist.reduce_scatter(out, parts, group=group)


def all_to_all(
    out: torch.Tensor, x: torch.Tensor, got: list[int], sent: list[int], group: ProcessGroup | None = None
) -> None:
    """got, sent: rows from and for each rank of the group."""
    dist.all_to_all_single(out, x, got, sent, group=group)


def broadcast(x: torch.Tensor, source: int, group: ProcessGroup | None = None) -> None:
    """source: a place in the group."""
    dist.broadcast(x, _global(source, group), group=group)


def isend(x: torch.Tensor, place: int, group: ProcessGroup | None = None, tag: int = 0) -> dist.Work:
    """Sends while the caller goes on; `wait` on what is returned ends it."""
    work = dist.isend(x, _global(place, group), group=group, tag=tag)
    assert work is not None
    return work


def irecv(x: torch.Tensor, place: int, group: ProcessGroup | None = None, tag: int = 0) -> dist.Work:
    work = dist.irecv(x, _global(place, group), group=group, tag=tag)
    assert work is not None
    return work


def closed_to(group: ProcessGroup, places: Iterable[int] | None = None) -> list[int]:
    """Those of these places of a gloo group (None: of all) whose connection is closed. None is waited for."""
    closed = []
    for place in range(size_of(group)) if places is None else places:
        try:
            if place != rank_in(group):
                irecv(torch.zeros(1), place, group, _PROBE)
        except RuntimeError:  # at once, where the connection is closed
            closed.append(place)
    return closed


def _global(place: int, group: ProcessGroup | None) -> int:
    return place if group is None else dist.get_global_rank(group, place)


# --- Python values, on the host ---


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, on every rank."""
    recorder: Any = group
    if rehearsed(group):
        recorder.note("all_gather_object")
        return [value] * size_of(group)
    out: list[Any] = [None] * size_of(group)
    dist.all_gather_object(out, value, group=group)
    return out


def broadcast_object(value: Any, source: int, group: ProcessGroup | None = None) -> Any:
    """The value of the rank at that place."""
    recorder: Any = group
    if rehearsed(group):
        recorder.note("broadcast_object", root=source)
        return value
    box = [value]
    dist.broadcast_object_list(box, src=_global(source, group), group=group)
    return box[0]
