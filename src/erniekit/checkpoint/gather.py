"""Whole tensors from the parts that ranks hold: one at a time, to the one rank that writes, over a gloo group.

Used by collective.py and nodes.py. The writer requests tensors and the other ranks reply, so that no rank
waits for one that failed: it reports the error, its connection closes, or the time-out passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit import heartbeat
from erniekit.checkpoint import rank_files, writer
from erniekit.checkpoint.blocks import local_shape, param_of, stored_boxes, stored_shape
from erniekit.checkpoint.host_copies import plain
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.wire import TIMEOUT, Wire
from erniekit.errors import CheckpointError
from erniekit.parallel import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from erniekit.parallel.sharding import Box, Sharding

CHUNK = 32 << 20  # bytes a message: what sending and receiving cost in memory beside the tensor itself
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
# The writer's words: answer with your part of tensor i; that was all, n bytes of JSON follow; I am at work, wait on.
# Or: write your part of these into a file of your own, n bytes of JSON say which and where.
_SEND, _END, _WAIT, _WRITE = 1, 2, 3, 4
WAIT_S = 1.0  # between two words to wait on, more where there are very many to tell: well below any hang limit

Local = Callable[[str], torch.Tensor | None]


class Exchange:
    """One gathering. On the writer: `fetch` in any order, then `end`. On all others: `serve` until it ends."""

    def __init__(
        self,
        names: Sequence[str],
        local: Local,
        sharding: Sharding,
        rank: int,
        group: ProcessGroup | None,
        writer: int = 0,
        timeout: float = TIMEOUT,
    ) -> None:
        """group: gloo, over all ranks, used by nothing else meanwhile; None for a process that is alone."""
        self.names, self.local, self.sharding = list(names), local, sharding
        self.rank, self.writer = rank, writer
        self.wire = Wire(group, timeout)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._others = [r for r in range(comm.size_of(group) if group else 1) if r != rank]
        self._talking = threading.Lock()  # one conversation at a time: its messages follow each other
        self._busy: set[int] = set()  # ranks that write, each of which a thread talks to

    # --- the writer ---

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around all the writer does before `end`: however long it hashes and syncs without asking other ranks, those
        hear of it well before their time-out. A thread of its own tells them, as one call may take that long; a writer
        that hangs is its own watchdog's business."""
        done = threading.Event()
        thread = threading.Thread(target=self._tell_to_wait, args=(done,), name="save-keep-alive", daemon=True)
        if self._others:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self._others:
                thread.join()

    def _tell_to_wait(self, done: threading.Event) -> None:
        every = min(max(WAIT_S, len(self._others) / 50), self.wire.timeout / 4)
        while not done.wait(every):
            for rank in self._others:
                with self._talking, suppress(CheckpointError):  # it is dead: `fetch` and `end` find out, too
                    if rank not in self.wire.lost | self._busy and not done.is_set():
                        self.wire.send_numbers(rank, _WAIT, 0)

    def fetch(self, name: str) -> torch.Tensor:
        """The whole tensor in host memory, bits and dtype as held; not a copy where this rank holds all of it."""
        with self._talking:
            return self._fetch(name)

    def _fetch(self, name: str) -> torch.Tensor:
        out = _Assembled(name, stored_shape(self.sharding, name))
        asked = []
        # Whatever fails, the answers of the ranks that were asked are on their way and must be received.
        for rank, boxes in self._holders(name):
            with out.noting_errors():
                if rank != self.rank:
                    self.wire.send_numbers(rank, _SEND, self._index[name])
                asked.append((rank, boxes))
        for rank, boxes in asked:
            with out.noting_errors():
                if rank == self.rank:
                    out.take(self._part(name), boxes)
                else:
                    self._receive(rank, boxes, out)
        return out.done()

    def write_parts(self, names: Sequence[str], suffix: str, folder: Path, stem: str) -> bool:
        """Every rank at once writes what it holds of these into a file of its own in `folder`; none sends a tensor.
        False: not all of them see the folder, and nothing is left in it. suffix: of names, not stored."""
        told = {"folder": str(folder), "stem": stem, "suffix": suffix, "names": [self._index[name] for name in names]}
        problems: list[CheckpointError] = []
        answers: dict[int, dict[str, Any]] = {}
        files: dict[Path, FileRecord] = {}
        with self._talking:
            self._busy.update(self._others)
        # One thread for each rank: ranks that have finished writing get keep-alive messages while others still write.
        threads = [
            threading.Thread(target=self._ask_to_write, args=(rank, told, answers, problems), daemon=True)
            for rank in self._others
        ]
        for thread in threads:
            thread.start()
        answers[self.rank] = self._write_own(told)
        for thread in threads:
            heartbeat.join(thread)
        problems += [CheckpointError(**answer) for answer in answers.values() if "what" in answer]
        if problems:
            raise problems[0]
        for answer in answers.values():
            files.update({folder / name: FileRecord(*record) for name, record in answer.get("files", {}).items()})
        if any("absent" in answer for answer in answers.values()):
            for path in files:
                path.unlink(missing_ok=True)
            return False
        for path, record in files.items():
            writer.remember(path, record)
        return True

    def _ask_to_write(
        self, rank: int, told: Mapping[str, Any], answers: dict[int, dict[str, Any]], problems: list[CheckpointError]
    ) -> None:
        try:
            self.wire.send_json(rank, told, _WRITE)
            word, size = _WAIT, 0
            while word == _WAIT:
                word, size = self.wire.receive_numbers(rank, 2)
            answers[rank] = self.wire.receive_json(rank, size)
        except CheckpointError as error:
            problems.append(error)
        finally:
            self._busy.discard(rank)

    def _write_own(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Everything but an answer would leave the other side waiting."""
        try:
            folder, parts = Path(told["folder"]), []
            if not folder.is_dir():
                return {"absent": True}
            for name in (self.names[number] for number in told["names"]):
                boxes = [box for rank, mine in self._holders(name) if rank == self.rank for box in mine]
                if boxes:
                    stored = name.removesuffix(told["suffix"])
                    parts.append((stored, boxes, stored_shape(self.sharding, name), self._part(name)))
            if not parts:
                return {}
            path = folder / rank_files.file_of(told["stem"], self.rank, len(self._others) + 1)
            record = rank_files.write_part(path, parts)
            return {"files": {path.name: [record.size, record.sha256]}}
        except CheckpointError as error:
            return {"what": f"rank {self.rank}: {error.what}", "where": error.where, "fix": error.fix}
        except Exception as error:
            return {"what": f"rank {self.rank}: {type(error).__name__}: {error}"}

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Tell every rank that can still be told. With a `what` it is an error to them."""
        for rank in self._others:
            if rank not in self.wire.lost:
                try:
                    self.wire.send_json(rank, outcome, _END)
                except CheckpointError:  # it is dead or dying and will not miss the news
                    continue

    def _receive(self, rank: int, boxes: Sequence[Box], out: _Assembled) -> None:
        status, code = self.wire.receive_numbers(rank, 2)
        if status:
            text = bytes(self.wire.receive(rank, torch.empty(status, dtype=torch.uint8)).tolist())
            raise CheckpointError(f"rank {rank}: {text.decode()}")
        whole = out.room(_DTYPES[code])
        for block in _blocks(boxes, whole.element_size()):
            target = whole[block.global_slices]
            if target.is_contiguous():
                self.wire.receive(rank, _as_bytes(target))
            else:
                piece = torch.empty_like(target, memory_format=torch.contiguous_format)
                self.wire.receive(rank, _as_bytes(piece))
                target.copy_(piece)
        out.agree(_DTYPES[code], rank)

    # --- everyone else ---

    def serve(self) -> dict[str, Any]:
        """Send what is asked for; returns what the writer ended with, raises when that is an error."""
        while True:
            word, number = self.wire.receive_numbers(self.writer, 2)
            if word == _WAIT:
                continue
            if word == _SEND:
                self._answer(self.names[number])
                continue
            outcome = self.wire.receive_json(self.writer, number)
            if word == _WRITE:
                with self._telling_the_writer():
                    answer = self._write_own(outcome)
                self.wire.send_json(self.writer, answer)
                continue
            if "what" in outcome:
                raise CheckpointError(**outcome)
            return outcome

    @contextmanager
    def _telling_the_writer(self) -> Iterator[None]:
        """However long this rank writes, the writer hears of it. A rank that hangs is its own watchdog's business."""
        done = threading.Event()

        def tell() -> None:
            with suppress(CheckpointError):  # the writer is gone, as the answer will find
                while not done.wait(WAIT_S):
                    self.wire.send_numbers(self.writer, _WAIT, 0)

        thread = threading.Thread(target=tell, name="save-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _answer(self, name: str) -> None:
        boxes = next(boxes for rank, boxes in self._holders(name) if rank == self.rank)
        try:
            part = self._part(name)
            code = _DTYPES.index(part.dtype)
        except Exception as error:  # whatever it is, the writer must not wait for it
            what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            data = torch.frombuffer(bytearray(what.encode() or b"?"), dtype=torch.uint8)
            self.wire.send_numbers(self.writer, data.numel(), 0)
            self.wire.send(self.writer, data)
            return
        self.wire.send_numbers(self.writer, 0, code)
        for block in _blocks(boxes, part.element_size()):
            self.wire.send(self.writer, _as_bytes(part[block.local_slices].to("cpu").contiguous()))

    # --- both ---

    def _holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        return [(rank, stored_boxes(boxes, name)) for rank, boxes in self.sharding.holders(param_of(name))]

    @torch.no_grad()
    def _part(self, name: str) -> torch.Tensor:
        part = self.local(name)
        if part is None:
            raise CheckpointError(f"has nothing of {name}, which the layout gives it a part of")
        part = plain(part)
        wanted = local_shape(self.sharding, name, self.rank)
        if tuple(part.shape) != tuple(wanted):
            raise CheckpointError(f"holds {name} as {tuple(part.shape)}; the layout says {tuple(wanted)}")
        return part


class _Assembled:
    """A tensor on its way: its parts, and the first thing that went wrong with them."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name, self.shape = name, tuple(shape)
        self.whole: torch.Tensor | None = None
        self.error: CheckpointError | None = None

    def take(self, part: torch.Tensor, boxes: Sequence[Box]) -> None:
        """Our own part. Where it is all there is, no copy is made."""
        if tuple(part.shape) == self.shape and [box.global_slices for box in boxes] == [_all(self.shape)]:
            self.whole = part.to("cpu")
            return
        whole = self.room(part.dtype)
        for box in boxes:
            whole[box.global_slices].copy_(part[box.local_slices])
        self.agree(part.dtype, None)

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """Where parts go; one of another dtype is received beside it, to be refused."""
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=dtype)
        return self.whole if self.whole.dtype == dtype else torch.empty(self.shape, dtype=dtype)

    def agree(self, dtype: torch.dtype, rank: int | None) -> None:
        assert self.whole is not None
        if self.whole.dtype != dtype:
            raise CheckpointError(f"{self.name} is {self.whole.dtype} on one rank and {dtype} on rank {rank}")

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.error = self.error or error

    def done(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if self.whole is None:
            raise CheckpointError(f"no rank holds {self.name}")
        return self.whole


def _blocks(boxes: Sequence[Box], item: int) -> Iterator[Box]:
    """Boxes in messages of about CHUNK bytes, cut along rows; the same on both sides."""
    for box in boxes:
        (rows, *rest), (here, *here_rest) = box.global_slices, box.local_slices
        step = max(1, CHUNK // max(1, item * prod(s.stop - s.start for s in rest)))
        for start in range(rows.start, rows.stop, step):
            stop, first = min(rows.stop, start + step), here.start + start - rows.start
            yield type(box)((slice(start, stop), *rest), (slice(first, first + stop - start), *here_rest))


def _all(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
