"""A process group that carries nothing and records every call: one process stands for any rank of any world.

`opened(rank, size)` makes it torch's default group; all groups made under it are of this kind, those of torch's own
parts (fully_shard, pipelining, device meshes) too. What comes back is plausible: other ranks are taken to have what
this one has.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from erniekit.devices import generic
from erniekit.rehearse.calls import Call, RankGroup, Trace

BACKEND = "rehearsal"
PACKAGE = str(Path(__file__).resolve().parents[1])
HERE = str(Path(__file__).resolve().parent)
# For calls from these the caller's line is shown instead.
DOORS = {str(Path(PACKAGE) / "parallel" / name) for name in ("comm.py", "boundary.py", "reduce.py")}
INNER_NAME = "parallel/collectives.py"  # shown with the line that calls these
INNER = str(Path(PACKAGE) / INNER_NAME)


def source_line() -> str:
    """The line that made the call, torch's own part in between where it did; of our collectives also their caller's."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(HERE) or file in DOORS:
            pass
        elif file.startswith(PACKAGE):
            line = f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
            if file != INNER or INNER_NAME not in "".join(found):
                found.append(line)
            if file != INNER:
                break
        elif _inside_torch(file):
            if not found:
                found.append(f"torch/{file.rpartition('/torch/')[2]}:{frame.f_lineno}")
        elif "site-packages" not in file and not file.startswith((sys.base_prefix, "<")):
            found.append(f"{Path(file).name}:{frame.f_lineno}")
            break
        frame = frame.f_back
    return " < ".join(found)


def _inside_torch(file: str) -> bool:
    return "/torch/distributed/" in file and not file.endswith(("distributed_c10d.py", "c10d_logger.py"))


class RecordedWork(dist.Work):
    """Of a call that is done as far as this process is concerned; that its rank waits for it is recorded once."""

    def __init__(self, trace: Trace, number: int, result: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._trace, self._number, self._result, self._waited = trace, number, list(result), False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._waited:
            self._waited = True
            self._trace.wait(self._number)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class RecordedGroup(dist.ProcessGroup):
    rehearsed = True  # read by parallel/comm.py

    def __init__(self, rank: int, members: Sequence[int], trace: Trace, made: Counter[tuple[int, ...]]) -> None:
        """rank: the place in the group. made: how many groups of the same members there are, counted here."""
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        key = tuple(members)
        self._group, self._trace, self._made = RankGroup(key, made[key]), trace, made
        made[key] += 1
        self._name, self._place, self._size = "", rank, len(members)

    # In Python: torch 2.11 compiles calls of C++ methods for its own group classes only.

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    # torch keeps a group's name in its backend, of which this one has none.

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    def note(self, op: str, root: int | None = None) -> None:
        """A blocking call without a tensor."""
        detail = "" if root is None else f"from rank {self._group.members[root]}"
        self._trace.blocking(Call(op, self._group, detail=detail, source=source_line()))

    def _start(self, op: str, x: torch.Tensor, result: Sequence[torch.Tensor], **more: Any) -> RecordedWork:
        dtype = str(x.dtype).removeprefix("torch.")
        call = Call(op, self._group, tuple(x.shape), dtype, source=source_line(), **more)
        return RecordedWork(self._trace, self._trace.start(call), result)

    # --- collectives ---

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._start("all_reduce", _one(tensors), tensors, detail=_reduction(opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> RecordedWork:
        works = [self._start("all_reduce", x, tensors, detail=_reduction(opts)) for x in tensors]
        return works[-1]

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> RecordedWork:  # type: ignore[override]
        root = self._group.members[opts.rootRank]
        return self._start("broadcast", _one(tensors), tensors, detail=f"from rank {root}")

    def allgather(  # type: ignore[override]
        self, parts: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        x = _one(inputs)
        for part in parts[0]:
            _fill(part, x)
        return self._start("all_gather", x, parts[0])

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> RecordedWork:
        for part in out.view(-1).chunk(self.size()) if holds_values(out) else ():
            _fill(part, x.reshape(-1))
        return self._start("all_gather", x, [out])

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        return [self.all_gather_single(out, x) for out, x in zip(outs, inputs)][-1]

    def reduce_scatter(  # type: ignore[override]
        self, outs: list[torch.Tensor], parts: list[list[torch.Tensor]], opts: Any = None
    ) -> RecordedWork:
        _fill(outs[0], parts[0][self.rank()])
        return self._start("reduce_scatter", outs[0], outs, detail=_reduction(opts))

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> RecordedWork:
        if holds_values(out):
            _fill(out.view(-1), x.reshape(-1)[: out.numel()])
        return self._start("reduce_scatter", out, [out], detail=_reduction(opts))

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> RecordedWork:
        return [self.reduce_scatter_single(out, x, opts) for out, x in zip(outs, inputs)][-1]

    def all_to_all_single(
        self, out: torch.Tensor, x: torch.Tensor, got: list[int], sent: list[int], opts: Any = None
    ) -> RecordedWork:
        even = [x.shape[0] // self.size()] * self.size()
        if holds_values(out):
            rows = min(out.shape[0], x.shape[0])
            out[:rows].copy_(x[:rows])
            out[rows:].zero_()
        return self._start("all_to_all", x, [out], sent=tuple(sent or even), got=tuple(got or even))

    def barrier(self, opts: Any = None) -> RecordedWork:
        number = self._trace.start(Call("barrier", self._group, source=source_line()))
        return RecordedWork(self._trace, number, ())

    # --- messages ---

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> RecordedWork:
        return self._start("send", _one(tensors), tensors, peer=self._group.members[peer], tag=tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> RecordedWork:
        if holds_values(tensors[0]):
            _made_up(tensors[0].detach())
        return self._start("recv", _one(tensors), tensors, peer=self._group.members[peer], tag=tag)

    # What older releases of torch call them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]


def _one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (x,) = tensors
    return x


def _reduction(opts: Any) -> str:
    return str(opts.reduceOp.op if hasattr(opts.reduceOp, "op") else opts.reduceOp).rpartition(".")[2].lower()


def holds_values(x: torch.Tensor) -> bool:
    """False of a tensor that only has a shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and not x.is_meta


def _fill(out: torch.Tensor, x: torch.Tensor) -> None:
    if holds_values(out) and holds_values(x) and out.shape == x.shape:
        out.detach().copy_(x.detach())


def _made_up(x: torch.Tensor) -> None:
    """What another stage would have sent. Tokens differ: of equal hidden states a router sends all to the same experts,
    whose rank would then have far more to hold and to compute than in a run. Votes of torch's stages are ones."""
    x.normal_() if x.is_floating_point() and x.dim() > 1 else x.fill_(1)


@contextmanager
def opened(rank: int, size: int) -> Iterator[Trace]:
    """torch's default group is a recorded one for this rank of so many; what it records."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", *_accelerators()])
    trace = Trace(rank)
    _OPEN.append((trace, Counter()))
    try:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
        yield trace
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _OPEN.pop()


# torch registers a backend once for the whole process: this is where it finds what to record into.
_OPEN: list[tuple[Trace, Counter[tuple[int, ...]]]] = []


def _create(options: Any, _: Any) -> RecordedGroup:
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return RecordedGroup(options.group_rank, members, *_OPEN[-1])


def _accelerators() -> list[str]:
    return [kind] if (kind := generic.any_kind()) else []
