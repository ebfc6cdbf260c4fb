"""Before a run trusts its ranks: every collective that the layout uses, and the mean of sharded gradients, on tensors
of a few numbers whose results are known. Called once by recipes/run_plan.py, after the ranks have met.

A build of torch or a vendor's library may lack a collective, or compute something else without an error: torch 2.7
and 2.8 hand fully_shard's gradients on as sums over gloo where the mean was requested. What is wrong is refused by
name, on every rank, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from erniekit.devices.base import Device
from erniekit.errors import DeviceError
from erniekit.parallel import comm
from erniekit.parallel.collectives import gather_from, scatter_sum, sum_from
from erniekit.parallel.fsdp import shard_options
from erniekit.parallel.islands import ACROSS
from erniekit.parallel.layout import AXES, CONFIG_KEYS
from erniekit.parallel.mesh import World
from erniekit.printable import counted

ANSWER = timedelta(seconds=60)  # for one exchange of a few numbers; ranks may still be importing
ROUNDING = 1e-3  # a mean over three ranks is not exact
# A test gives back what is wrong, or None.
Test = Callable[[], str | None]


def check_collectives(
    world: World, device: Device, compute: torch.dtype = torch.float32, torch_schedules: bool = False
) -> None:
    """Raises the same DeviceError on every rank where something is wrong on any. torch_schedules: pipelines run on
    torch's own."""
    if world.size == 1:
        return
    for key, what, test in _tests(world, device.handle, compute, torch_schedules):
        try:
            problem = test()
        except Exception as error:  # "not supported", a time-out, a lost peer: the backend's own message
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        found = world.gather(problem)
        wrong = [f"rank {rank}: {each}" for rank, each in enumerate(found) if each is not None]
        if wrong:
            more = f" (and {counted(len(wrong) - 1, 'more rank')})" if len(wrong) > 1 else ""
            raise DeviceError(
                f"{what} does not work with torch {torch.__version__} and {device.backend}: {wrong[0]}{more}",
                where=key,
                fix=f"another build of torch (2.11 and newer are tested), or a layout without {key}",
            )


def _tests(
    world: World, own: torch.device, compute: torch.dtype, torch_schedules: bool
) -> Iterator[tuple[str, str, Test]]:
    """(the user's key, what is tried, the test) of all that the layout uses, in one order on every rank."""
    layout = world.layout
    for axis in (axis for axis in AXES if getattr(layout, axis) > 1):
        group = world.group(axis)
        assert group is not None
        key, on = CONFIG_KEYS[axis], _carried_on(world, group, own)
        yield key, "all_reduce", lambda g=group, on=on: _all_reduce(g, on)  # type: ignore[misc]
        if axis in ("tp", "cp"):
            yield key, "all_gather", lambda g=group, on=on: _gather(g, on)  # type: ignore[misc]
        if axis == "cp" or (axis == "tp" and layout.sequence_parallel):
            scatter_key = key if axis == "cp" else "sequence_parallel"
            yield scatter_key, "reduce_scatter", lambda g=group, on=on: _scatter(g, on)  # type: ignore[misc]
        if axis == "pp":
            yield key, "send and receive", lambda g=group, on=on: _neighbours(g, on)  # type: ignore[misc]
            yield key, "broadcast", lambda g=group, on=on: _broadcast(g, on)  # type: ignore[misc]
            if torch_schedules:
                yield key, "the pipeline schedule", lambda on=on: _schedule(on)  # type: ignore[misc]
        if axis == "fsdp":
            yield key, "the mean of sharded gradients", lambda: _sharded_mean(world, own, compute)
    if layout.experts_over_data:
        yield "moe_group", "all_to_all", lambda: _all_to_all(own)


def _carried_on(world: World, group: ProcessGroup, own: torch.device) -> torch.device:
    """Between islands of unlike devices: tensors of the host only."""
    if world.islands is None or world.islands.backend(dist.get_process_group_ranks(group)) != ACROSS:
        return own
    return torch.device("cpu")


def _numbers(rank: int, on: torch.device) -> torch.Tensor:
    """Four that identify the rank."""
    return torch.arange(4, dtype=torch.float32, device=on) + 10 * rank


def _differs(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    found, expected = found.detach().float().cpu(), expected.detach().float().cpu()
    if found.shape == expected.shape and torch.allclose(found, expected, rtol=ROUNDING):
        return None
    return f"{found.flatten()[:4].tolist()} came where {expected.flatten()[:4].tolist()} should"


def _all(group: ProcessGroup, on: torch.device) -> list[torch.Tensor]:
    return [_numbers(rank, on) for rank in range(group.size())]


def _all_reduce(group: ProcessGroup, on: torch.device) -> str | None:
    mine, all_of_them = _numbers(group.rank(), on), torch.stack(_all(group, on))
    most = mine.clone()
    comm.all_reduce(most, group, "max")
    return _differs(sum_from(mine, group), all_of_them.sum(0)) or _differs(most, all_of_them.amax(0))


def _gather(group: ProcessGroup, on: torch.device) -> str | None:
    return _differs(gather_from(_numbers(group.rank(), on), 0, group), torch.cat(_all(group, on)))


def _scatter(group: ProcessGroup, on: torch.device) -> str | None:
    """Slice j of rank r's row is r's numbers plus j."""
    ranks, mine = group.size(), group.rank()
    row = torch.cat([_numbers(mine, on) + j for j in range(ranks)])
    return _differs(scatter_sum(row, 0, group), torch.stack(_all(group, on)).sum(0) + ranks * mine)


def _broadcast(group: ProcessGroup, on: torch.device) -> str | None:
    last = group.size() - 1
    box = _numbers(group.rank(), on)
    comm.broadcast(box, last, group)
    return _differs(box, _numbers(last, on))


def _neighbours(group: ProcessGroup, on: torch.device) -> str | None:
    """Down the pipeline and back up, as micro-batches and their gradients go."""
    ranks, mine = group.size(), group.rank()
    for step in (1, -1):
        to, source, sent, got = mine + step, mine - step, _numbers(mine, on), torch.empty(4, device=on)
        works: list[dist.Work] = []
        # Even places send first, odd ones receive first: nothing hangs where starting a call means waiting.
        for sends in (True, False) if mine % 2 == 0 else (False, True):
            if sends and 0 <= to < ranks:
                works.append(comm.isend(sent, to, group))
            elif not sends and 0 <= source < ranks:
                works.append(comm.irecv(got, source, group))
        for work in works:
            work.wait(ANSWER)
        if 0 <= source < ranks and (problem := _differs(got, _numbers(source, on))):
            return problem
    return None


def _schedule(on: torch.device) -> str | None:
    """Not tried: it would hang. torch 2.7's schedules wait only for the last of several messages; NCCL has one for
    all of them, gloo one for each."""
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    old = on.type == "cpu" and (major, minor) < (2, 8)
    return "torch's schedules before 2.8 hang over gloo" if old else None


def _all_to_all(on: torch.device) -> str | None:
    """Rank r sends r + j + 1 numbers to rank j: uneven, as tokens for experts are."""
    ranks, mine = dist.get_world_size(), dist.get_rank()
    sent, got = ([mine + j + 1 for j in range(ranks)] for _ in range(2))
    rows = torch.cat([torch.full((n,), float(10 * mine + j), device=on) for j, n in enumerate(sent)])
    out = torch.empty(sum(got), device=on)
    comm.all_to_all(out, rows, got, sent)
    return _differs(out, torch.cat([torch.full((n,), float(10 * r + mine), device=on) for r, n in enumerate(got)]))


class _Tiny(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2 * ranks, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def _sharded_mean(world: World, on: torch.device, compute: torch.dtype) -> str | None:
    """The gradient of a sharded weight is the mean over all ranks that read other data: what the loss is scaled for.
    Twice, as gradients of micro-batches add up."""
    from torch.distributed.fsdp import fully_shard

    layout = world.layout
    options: dict[str, Any] = shard_options(world, compute)
    at = world.at
    ranks = layout.dp * layout.fsdp * layout.cp
    mine = (at["dp"] * layout.fsdp + at["fsdp"]) * layout.cp + at["cp"]
    model = _Tiny(layout.fsdp * layout.cp).to(on)
    for part in (model.inner, model):
        fully_shard(part, reshard_after_forward=layout.sharding_stage == 3, **options)
    for _ in range(2):
        model(_numbers(mine, on)[None].to(compute)).float().sum().backward()
    grad: Any = model.inner.weight.grad
    expected = 2 * torch.stack([_numbers(rank, on) for rank in range(ranks)]).mean(0)
    whole = grad.full_tensor()
    return _differs(whole, expected.expand_as(whole))
