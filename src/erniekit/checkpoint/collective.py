"""Saves that all ranks make together: each hands in what it holds, rank 0 writes whole tensors, all learn how it went.

Used by train/save.py, with one rank as with many. In the background with the manager's async_save: training then waits
for copies to host memory only, and for a save before it that is still being written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit.checkpoint.assembly import ModelFiles
from erniekit.checkpoint.blocks import param_of, stored_shape
from erniekit.checkpoint.gather import Exchange
from erniekit.checkpoint.host_copies import HostCopies, plain
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.parts import DTYPES
from erniekit.checkpoint.shards import write_json
from erniekit.checkpoint.wire import TIMEOUT
from erniekit.checkpoint.writer import AsyncSaver
from erniekit.errors import CheckpointError, RankLost
from erniekit.log import warn
from erniekit.printable import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from erniekit.devices.base import Device
    from erniekit.parallel.mesh import World
    from erniekit.parallel.sharding import Sharding

Groups = Mapping[str, Mapping[str, torch.Tensor]]  # "weights" | "moments" | ... -> name -> tensor
Write = Callable[[Path, "Mapping[str, Whole]"], None]


class CollectiveSaves:
    def __init__(
        self,
        manager: CheckpointManager,
        world: World,
        sharding: Sharding,
        device: Device,
        group: ProcessGroup | None = None,
        after: Callable[[Path], None] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """manager: started (holding the lock) on rank 0, on the others only looked at. group: gloo, over all ranks, for
        these saves only; None with one rank. after: called on every rank, where the save runs, once it is published.
        """
        self.manager, self.world, self.sharding, self.group = manager, world, sharding, group
        self.after, self.timeout = after, timeout
        self.misses = 0  # saves that failed since the last good one; the same on all ranks
        self.failed: list[tuple[int, str]] = []  # steps that were not saved, and why; whoever tells the user takes them
        self._copies, self._thread = HostCopies(device), AsyncSaver()
        self._outcome: dict[str, Any] = {}  # of the last save, as this rank saw it
        self._fault: BaseException | None = None  # what was no failed save but an error of ours, or a Ctrl-C
        self._in_flight = False
        self._closed: tuple[int, set[int]] = (0, set())  # the step of the last save, and who could not be reached
        self._needed_params = {n for n in sharding.names() if any(r == world.rank for r, _ in sharding.holders(n))}

    def save(
        self,
        step: int,
        pieces: Groups,
        write: Write,
        info: dict[str, Any] | None = None,
        *,
        final: bool = False,
        model: ModelFiles | None = None,
    ) -> Path | None:
        """`write(folder, whole)` is called on rank 0; `whole` has the groups of `pieces`, each tensor gathered when
        read. model: how they are stored in a model's files, for those that all ranks write together
        (Whole.write_files).

        The published folder, or None: it failed and training goes on, or it is being written. Raises on every rank
        after `max_misses` failures in a row, and at once for the `final` save, which is never in the background.
        """
        self.wait()
        held = {_key(group, name): plain(t) for group, tensors in pieces.items() for name, t in tensors.items()}
        keys = self._catalogue(held)
        if self.manager.async_save and not final:
            held = self._copies.take({k: t for k, t in held.items() if param_of(k) in self._needed_params})
        rank = self.world.rank
        exchange = Exchange(
            list(keys), held.get, self.sharding, rank, self.group, timeout=self.timeout, dtypes=keys, model=model
        )
        whole = {group: Whole(exchange, group) for group in pieces}
        size = sum(prod(stored_shape(self.sharding, key)) * dtype.itemsize for key, dtype in keys.items())

        def run() -> None:
            if self.world.is_main:
                with exchange.at_work():
                    self._outcome = self._publish(exchange, step, lambda folder: write(folder, whole), info or {}, size)
                exchange.end(self._outcome)
            else:
                self._outcome = self._serve(exchange)
            self._copy()

        self._in_flight, self._closed = True, (step, exchange.wire.closed)
        if self.manager.async_save and not final:
            self._thread.start(run)
            return None
        run()
        return self._settle(final)

    @property
    def in_flight(self) -> bool:
        """A save in the background whose outcome is not known yet; the same on all ranks."""
        return self._in_flight

    def check(self) -> None:
        """Call it every step, on all ranks: reports a background save that ended, at the same step everywhere."""
        if self._in_flight and not self.world.max(self._thread.busy):
            self.wait()

    def wait(self) -> None:
        """All ranks: until the save in flight has ended."""
        if self._in_flight:
            self._thread.wait()
            self._settle(final=False)

    def close(self) -> None:
        """The end of training, on all ranks: a save in flight that failed was the last, and raises."""
        if self._in_flight:
            self._thread.wait()
            self._settle(final=True)

    def abandon(self) -> None:
        """This rank is leaving with an error: let a save in flight end, good or not, without a message to the
        others."""
        self._thread.wait()
        self._in_flight = False

    def lost_rank(self) -> RankLost | None:
        """Where ranks ended within the last save: the error that says so."""
        step, closed = self._closed
        ranks = self.world.ended(closed) if closed else []
        return RankLost(f"{named_ranks(ranks)} ended while checkpoint-{step} was being saved") if ranks else None

    def published(self, step: int) -> bool:
        """Whether rank 0 has the checkpoint of this step on disk, with every file of its manifest."""
        return bool(self.world.broadcast(self.world.is_main and self._is_whole(step)))

    def _is_whole(self, step: int) -> bool:
        try:
            self.manager.verify(self.manager.output_dir / f"checkpoint-{step}", "size")
            return True
        except CheckpointError:
            return False

    # --- how one goes ---

    def _catalogue(self, held: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
        """Every tensor any rank has, in the model's order: the same on all ranks."""
        dtypes: dict[str, torch.dtype] = {}
        for theirs in self.world.gather([(key, DTYPES.index(t.dtype)) for key, t in held.items()]):
            dtypes.update((key, DTYPES[code]) for key, code in theirs)
        order = {name: i for i, name in enumerate(self.sharding.names())}
        strange = [key for key in dtypes if param_of(key) not in order]
        if strange:
            raise CheckpointError(f"the layout does not contain {param_of(strange[0])}, so no rank can save it")
        return dict(sorted(dtypes.items(), key=lambda item: (order[param_of(item[0])], item[0])))

    def _publish(
        self, exchange: Exchange, step: int, write: Callable[[Path], None], info: dict[str, Any], size: int
    ) -> dict[str, Any]:
        try:
            # final: the manager raises whatever goes wrong, and all ranks decide alike what it means
            path = self.manager.save(step, write, info, expected_bytes=size, final=True)
            assert path is not None
            return {"name": path.name}
        except CheckpointError as error:
            return {"what": error.what, "where": error.where, "fix": error.fix}
        except BaseException as error:
            self._fault = error  # raised once the others have the outcome
            return {"what": f"rank 0 failed while saving: {type(error).__name__}: {error}"}

    def _serve(self, exchange: Exchange) -> dict[str, Any]:
        try:
            return exchange.serve()
        except CheckpointError as error:
            return {"what": error.what, "where": error.where, "fix": error.fix}

    def _copy(self) -> None:
        """The checkpoint is safe where it was written; a copy that fails is worth a warning, not a miss."""
        if self.after is None or "name" not in self._outcome:
            return
        try:
            self.after(self.manager.output_dir / self._outcome["name"])
        except CheckpointError as error:
            self._outcome["not_copied"] = error.what

    def _settle(self, final: bool) -> Path | None:
        """Rank 0's outcome counts, so that all ranks count the same misses and stop together."""
        self._in_flight = False
        if lost := self.lost_rank():  # no collective ends any more
            raise self._fault or lost
        outcome, fault = self.world.broadcast((self._outcome, self._fault is not None))
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if "what" not in outcome:
            self.misses = 0
            if "not_copied" in outcome:
                warn(f"{outcome['name']} is saved but was not copied: {outcome['not_copied']}")
            return self.manager.output_dir / outcome["name"]
        self.misses += 1
        self.failed.append((self._closed[0], outcome["what"]))
        if final or fault:
            raise CheckpointError(**outcome)
        if self.misses >= self.manager.max_misses:
            what = f"{outcome['what']}; {counted(self.misses, 'save')} failed in a row"
            raise CheckpointError(**{**outcome, "what": what})
        warn(f"CHECKPOINT NOT SAVED: {outcome['what']} ({self.misses} of {self.manager.max_misses} in a row)")
        return None


class SavedTensors(Mapping[str, torch.Tensor]):
    """Tensors by our names, for a writer of files."""

    def write_files(self, folder: Path, stem: str) -> torch.dtype | None:
        """The model's files with their index, or its one file, written by all ranks after ModelFiles; returns the
        dtype of the first tensor. None where that cannot be done, and the caller writes them."""
        return None


class Whole(SavedTensors):
    """One group of tensors on the writer: each is gathered when it is read, and not kept."""

    def __init__(self, exchange: Exchange, group: str) -> None:
        self.exchange, self.group = exchange, group
        self.mine = {key.removesuffix(f"/@{group}"): key for key in exchange.names if key.endswith(f"/@{group}")}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.exchange.fetch(self.mine[name])

    def write_parts(self, folder: Path, stem: str) -> bool:
        """By all ranks, each into a file of its own; False where there is one rank, or not all see the folder."""
        if self.exchange.wire.group is None:
            return False
        return self.exchange.write_parts(list(self.mine.values()), f"/@{self.group}", folder, stem)

    def write_files(self, folder: Path, stem: str) -> torch.dtype | None:
        plan = self.exchange.write_files(f"/@{self.group}", folder, stem)
        if plan is None or self.exchange.model is None:
            return None
        if plan.one is None:
            write_json(folder / f"{stem}.safetensors.index.json", plan.index)
        return self.exchange.dtypes[self.mine[self.exchange.model.entries[0].ours]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)


def named_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 1, 2`."""
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _key(group: str, name: str) -> str:
    return f"{name}/@{group}"
