"""Whole tensors from the parts that ranks hold: one at a time, to the one rank that writes, over a gloo group.

Used by collective.py and nodes.py. The writer requests tensors and the other ranks reply, so that no rank
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

# The writer's words: answer with your part of tensor i; that was all, n bytes of JSON follow; I am at work, wait on.
# Or: write your part of these into a file of your own, n bytes of JSON say which and where; or: do you see that folder;
# or: write the files of the model that are yours.
_SEND, _END, _WAIT, _WRITE, _SEE, _FILES = 1, 2, 3, 4, 5, 6
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
        dtypes: Mapping[str, torch.dtype] | None = None,
        model: ModelFiles | None = None,
    ) -> None:
        """group: gloo, over all ranks, used by nothing else meanwhile; None for a process that is alone. dtypes: of the
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
        out = Gathered(name, stored_shape(self.sharding, name))
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
                    receive_part(self.wire, rank, boxes, out)
        return out.done()

    def write_parts(self, names: Sequence[str], suffix: str, folder: Path, stem: str) -> bool:
        """Every rank at once writes what it holds of these into a file of its own in `folder`; none sends a tensor.
        False: not all of them see the folder, and nothing is left in it. suffix: of names, not stored."""
        order = {"folder": str(folder), "stem": stem, "suffix": suffix, "names": [self._index[name] for name in names]}
        answers = self._together(_WRITE, order)
        files = _files_in(folder, answers)
        if any("absent" in answer for answer in answers):
            for path in files:
                path.unlink(missing_ok=True)
            return False
        for path, record in files.items():
            writer.remember(path, record)
        return True

    def write_files(self, suffix: str, folder: Path, stem: str) -> FilePlan | None:
        """Every rank at once writes some of the model's files, whole tensors in the layout of `model`. None: there is
        one rank, the model fits one file, or not all see the folder."""
        order = {"folder": str(folder), "stem": stem, "suffix": suffix}
        if self.model is None or not self._others:
            return None
        plan = self._plan(suffix, stem)
        if plan.bytes <= self.model.limit:
            return None
        if any("absent" in answer for answer in self._together(_SEE, order)):
            return None
        for path, record in _files_in(folder, self._together(_FILES, order)).items():
            writer.remember(path, record)
        return plan

    def _together(self, word: int, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank answers to it; the first error among these is raised."""
        problems: list[CheckpointError] = []
        answers: dict[int, dict[str, Any]] = {}
        with self._talking:
            self._busy.update(self._others)
        # One thread for each rank: ranks that have finished writing get keep-alive messages while others still write.
        threads = [
            threading.Thread(target=self._ask, args=(rank, word, order, answers, problems), daemon=True)
            for rank in self._others
        ]
        for thread in threads:
            thread.start()
        answers[self.rank] = self._done(word, order)
        for thread in threads:
            heartbeat.join(thread)
        problems += [CheckpointError(**answer) for answer in answers.values() if "what" in answer]
        if problems:
            raise problems[0]
        return list(answers.values())

    def _ask(
        self, rank: int, word: int, order: Mapping[str, Any], answers: dict[int, dict[str, Any]],
        problems: list[CheckpointError],
    ) -> None:  # fmt: skip
        try:
            self.wire.send_json(rank, order, word)
            word, size = _WAIT, 0
            while word == _WAIT:
                word, size = self.wire.receive_numbers(rank, 2)
            answers[rank] = self.wire.receive_json(rank, size)
        except CheckpointError as error:
            problems.append(error)
        finally:
            self._busy.discard(rank)

    def _done(self, word: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """Everything but an answer would leave the other side waiting."""
        try:
            if word == _WRITE:
                return self._write_own(order)
            if word == _FILES:
                return self._write_files(order)
            return {} if Path(order["folder"]).is_dir() else {"absent": True}
        except CheckpointError as error:
            return {"what": f"rank {self.rank}: {error.what}", "where": error.where, "fix": error.fix}
        except Exception as error:
            return {"what": f"rank {self.rank}: {type(error).__name__}: {error}"}

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
        path = folder / rank_files.file_of(order["stem"], self.rank, len(self._others) + 1)
        return _answer_of({path.name: rank_files.write_part(path, parts)})

    def _write_files(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.model is not None
        suffix, wire = order["suffix"], Wire(self.wire.group, self.wire.timeout, DATA)
        assembly = Assembly(
            self._plan(suffix, order["stem"]), self.model, self.rank, wire,
            lambda name: self._holders(name + suffix), lambda name: self._part(name + suffix),
            lambda name: stored_shape(self.sharding, name + suffix),
        )  # fmt: skip
        return _answer_of(assembly.write(Path(order["folder"])))

    def _plan(self, suffix: str, stem: str) -> FilePlan:
        assert self.model is not None
        return plan_files(
            self.model, stem, lambda name: stored_shape(self.sharding, name + suffix),
            lambda name: self.dtypes[name + suffix], lambda name: self._holders(name + suffix),
        )  # fmt: skip

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Tell every rank that can still be told. With a `what` it is an error to them."""
        for rank in self._others:
            if rank not in self.wire.lost:
                try:
                    self.wire.send_json(rank, outcome, _END)
                except CheckpointError:  # it is dead or dying and will not miss the news
                    continue

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
            if word != _END:
                with self._telling_the_writer():
                    answer = self._done(word, outcome)
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
        wanted = local_shape(self.sharding, name, self.rank)
        if tuple(part.shape) != tuple(wanted):
            raise CheckpointError(f"holds {name} as {tuple(part.shape)}; the layout says {tuple(wanted)}")
        return part


def _answer_of(files: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {"files": {name: [record.size, record.sha256] for name, record in files.items()}}


def _files_in(folder: Path, answers: Iterable[Mapping[str, Any]]) -> dict[Path, FileRecord]:
    return {folder / name: FileRecord(*record) for one in answers for name, record in one.get("files", {}).items()}
