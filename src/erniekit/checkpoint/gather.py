"""Whole tensors from the parts that ranks hold: one at a time, to the one rank that writes, over a gloo group.

Used by collective.py. The writer requests tensors and the other ranks reply, so that no rank
waits for one that failed: it reports the error, its connection closes, or the time-out passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit import heartbeat
from erniekit.checkpoint import rank_files, writer
from erniekit.checkpoint.assembly import DATA, Assembly, FilePlan, ModelFiles, plan_files
from erniekit.checkpoint.blocks import local_shape, param_of, stored_boxes, stored_shape
from erniekit.checkpoint.host_copies import plain
from erniekit.checkpoint.manifest import FileRecord
from erniekit.checkpoint.parts import Gathered, receive_part, send_part, send_problem
from erniekit.checkpoint.wire import TIMEOUT, Wire
from erniekit.errors import CheckpointError
from erniekit.parallel import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from erniekit.parallel.sharding import Box, Sharding

# Commands of the writer, each with a number. SEND: send your part of tensor i. END: done, n bytes of JSON follow.
# WAIT: keep-alive. WRITE: write your part of the tensors named in n bytes of JSON into a file of your own. SEE: report
# whether you see that folder. FILES: write the model's files that are yours.
_SEND, _END, _WAIT, _WRITE, _SEE, _FILES = 1, 2, 3, 4, 5, 6
ONE_FILE = 256 << 20  # bytes of a model that one rank writes: it takes a fraction of a second
WAIT_S = 1.0  # between two keep-alive messages, more with very many ranks: well below any hang limit

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
        dtypes: Mapping[str, torch.dtype] | None = None,
        model: ModelFiles | None = None,
    ) -> None:
        """group: gloo, over all ranks, used by nothing else meanwhile; None for a single process. dtypes: of the
        names; model: how the weights among them are stored; both the same on all ranks, for `write_files`."""
        self.dtypes, self.model = dict(dtypes or {}), model
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
        """Around all the writer does before `end`: while it hashes and syncs without a command to other ranks, a thread
        sends those keep-alive messages well before their time-out, as one call may take that long. The writer's own
        watchdog notices when it hangs."""
        done = threading.Event()
        thread = threading.Thread(target=self._send_keep_alives, args=(done,), name="save-keep-alive", daemon=True)
        if self._others:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self._others:
                thread.join()

    def _send_keep_alives(self, done: threading.Event) -> None:
        every = min(max(WAIT_S, len(self._others) / 50), self.wire.timeout / 4)
        while not done.wait(every):
            for rank in self._others:
                with self._talking, suppress(CheckpointError):  # a dead rank: `fetch` and `end` find out, too
                    if rank not in self.wire.lost | self._busy and not done.is_set():
                        self.wire.send_numbers(rank, _WAIT, 0)

    def fetch(self, name: str) -> torch.Tensor:
        """The whole tensor in host memory, bits and dtype as held; not a copy where this rank holds all of it."""
        with self._talking:
            return self._fetch(name)

    def _fetch(self, name: str) -> torch.Tensor:
        out = Gathered(name, stored_shape(self.sharding, name))
        requested = []
        # Whatever fails, the replies of the ranks that got a request are on their way and must be received.
        for rank, boxes in self._holders(name):
            with out.noting_errors():
                if rank != self.rank:
                    self.wire.send_numbers(rank, _SEND, self._index[name])
                requested.append((rank, boxes))
        for rank, boxes in requested:
            with out.noting_errors():
                if rank == self.rank:
                    out.take(self._part(name), boxes)
                else:
                    receive_part(self.wire, rank, boxes, out)
        return out.done()

    def write_parts(self, names: Sequence[str], suffix: str, folder: Path, stem: str) -> bool:
        """Every rank at once writes what it holds of these into a file of its own in `folder`; none sends a tensor.
        False: not all of them see the folder, and nothing is left in it. suffix: of names, not stored."""
        order = {"folder": str(folder), "stem": stem, "suffix": suffix, "names": [self._index[name] for name in names]}
        replies = self._together(_WRITE, order).values()
        files = _files_in(folder, replies)
        if any("absent" in reply for reply in replies):
            for path in files:
                path.unlink(missing_ok=True)
            return False
        for path, record in files.items():
            writer.remember(path, record)
        return True

    def write_files(self, suffix: str, folder: Path, stem: str) -> FilePlan | None:
        """Every rank at once writes some of the model's files, or its part of the one there is: whole tensors in the
        layout of `model`. None: there is one rank, the model is small, or not all see the folder."""
        order = {"folder": str(folder), "stem": stem, "suffix": suffix}
        if self.model is None or not self._others:
            return None
        plan = self._plan(suffix, stem)
        if plan.bytes <= min(self.model.limit, ONE_FILE) or (plan.one is not None and len(plan.sources) < 2):
            return None
        if any("absent" in reply for reply in self._together(_SEE, order).values()):
            return None
        if plan.one is not None:
            plan.one.make(folder)
        replies = self._together(_FILES, order)
        if plan.one is not None:
            told = {rank: FileRecord(*files[plan.one.name]) for rank, r in replies.items() if (files := r.get("files"))}
            writer.remember(folder / plan.one.name, plan.one.record(told))
        else:
            for path, record in _files_in(folder, replies.values()).items():
                writer.remember(path, record)
        return plan

    def _together(self, command: int, order: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The reply of every rank to the command; the first error among these is raised."""
        problems: list[CheckpointError] = []
        replies: dict[int, dict[str, Any]] = {}
        with self._talking:
            self._busy.update(self._others)
        # One thread for each rank: ranks that have finished writing get keep-alive messages while others still write.
        threads = [
            threading.Thread(target=self._command, args=(rank, command, order, replies, problems), daemon=True)
            for rank in self._others
        ]
        for thread in threads:
            thread.start()
        replies[self.rank] = self._done(command, order)
        for thread in threads:
            heartbeat.join(thread)
        problems += [CheckpointError(**reply) for reply in replies.values() if "what" in reply]
        if problems:
            raise problems[0]
        return replies

    def _command(
        self, rank: int, command: int, order: Mapping[str, Any], replies: dict[int, dict[str, Any]],
        problems: list[CheckpointError],
    ) -> None:  # fmt: skip
        try:
            self.wire.send_json(rank, order, command)
            command, size = _WAIT, 0
            while command == _WAIT:
                command, size = self.wire.receive_numbers(rank, 2)
            replies[rank] = self.wire.receive_json(rank, size)
        except CheckpointError as error:
            problems.append(error)
        finally:
            self._busy.discard(rank)

    def _done(self, command: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a command, errors included: without one the other side would wait."""
        try:
            if command == _WRITE:
                return self._write_own(order)
            if command == _FILES:
                return self._write_files(order)
            return {} if Path(order["folder"]).is_dir() else {"absent": True}
        except CheckpointError as error:
            return self._problem(error)
        except OSError as error:
            return self._problem(writer.not_written(Path(order["folder"]), error))
        except Exception as error:
            return {"what": f"rank {self.rank}: {type(error).__name__}: {error}"}

    def _problem(self, error: CheckpointError) -> dict[str, Any]:
        return {"what": f"rank {self.rank}: {error.what}", "where": error.where, "fix": error.fix}

    def _write_own(self, order: Mapping[str, Any]) -> dict[str, Any]:
        folder, parts = Path(order["folder"]), []
        if not folder.is_dir():
            return {"absent": True}
        for name in (self.names[number] for number in order["names"]):
            boxes = [box for rank, mine in self._holders(name) if rank == self.rank for box in mine]
            if boxes:
                stored = name.removesuffix(order["suffix"])
                parts.append((stored, boxes, stored_shape(self.sharding, name), self._part(name)))
        if not parts:
            return {}
        ranks = len(self._others) + 1
        return _reply_of(rank_files.write_parts(folder, order["stem"], self.rank, ranks, parts))

    def _write_files(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.model is not None
        suffix, wire = order["suffix"], Wire(self.wire.group, self.wire.timeout, DATA)
        assembly = Assembly(
            self._plan(suffix, order["stem"]), self.model, self.rank, wire,
            lambda name: self._holders(name + suffix), lambda name: self._part(name + suffix),
            lambda name: stored_shape(self.sharding, name + suffix),
        )  # fmt: skip
        return _reply_of(assembly.write(Path(order["folder"])))

    def _plan(self, suffix: str, stem: str) -> FilePlan:
        assert self.model is not None
        return plan_files(
            self.model, stem, lambda name: stored_shape(self.sharding, name + suffix),
            lambda name: self.dtypes[name + suffix], lambda name: self._holders(name + suffix),
        )  # fmt: skip

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Sends the outcome to every rank that can be reached, and who cannot. With a `what` it is an error to them."""
        for rank in self._others:
            if rank not in self.wire.lost:
                try:
                    self.wire.send_json(rank, {**outcome, "closed": sorted(self.wire.closed)}, _END)
                except CheckpointError:  # its process has ended or is ending, and needs no message
                    continue

    # --- everyone else ---

    def serve(self) -> dict[str, Any]:
        """Serves the writer's commands; returns the outcome it ended with, raises when that is an error."""
        while True:
            command, number = self.wire.receive_numbers(self.writer, 2)
            if command == _WAIT:
                continue
            if command == _SEND:
                self._send_part(self.names[number])
                continue
            outcome = self.wire.receive_json(self.writer, number)
            if command != _END:
                with self._keeping_writer_waiting():
                    reply = self._done(command, outcome)
                self.wire.send_json(self.writer, reply)
                continue
            self.wire.closed.update(outcome.pop("closed"))
            if "what" in outcome:
                raise CheckpointError(**outcome)
            return outcome

    @contextmanager
    def _keeping_writer_waiting(self) -> Iterator[None]:
        """Keep-alive messages to the writer while this rank writes. The rank's own watchdog notices when it hangs."""
        done = threading.Event()

        def send() -> None:
            with suppress(CheckpointError):  # the writer is lost: sending the reply will fail
                while not done.wait(WAIT_S):
                    self.wire.send_numbers(self.writer, _WAIT, 0)

        thread = threading.Thread(target=send, name="save-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _send_part(self, name: str) -> None:
        boxes = next(boxes for rank, boxes in self._holders(name) if rank == self.rank)
        try:
            part = self._part(name)
        except Exception as error:
            send_problem(self.wire, self.writer, error)
        else:
            send_part(self.wire, self.writer, part, boxes)

    # --- both ---

    def _holders(self, name: str) -> list[tuple[int, tuple[Box, ...]]]:
        return [(rank, stored_boxes(boxes, name)) for rank, boxes in self.sharding.holders(param_of(name))]

    @torch.no_grad()
    def _part(self, name: str) -> torch.Tensor:
        part = self.local(name)
        if part is None:
            raise CheckpointError(f"has nothing of {name}, which the layout gives it a part of")
        part = plain(part)
        expected = local_shape(self.sharding, name, self.rank)
        if tuple(part.shape) != tuple(expected):
            raise CheckpointError(f"holds {name} as {tuple(part.shape)}; the layout says {tuple(expected)}")
        return part


def _reply_of(files: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {"files": {name: [record.size, record.sha256] for name, record in files.items()}}


def _files_in(folder: Path, replies: Iterable[Mapping[str, Any]]) -> dict[Path, FileRecord]:
    return {folder / name: FileRecord(*record) for reply in replies for name, record in reply.get("files", {}).items()}
