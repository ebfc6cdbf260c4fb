"""Saving a run's whole state and bringing it back: weights, optimiser, counters, generators, and the probe as proof.

Built by recipes/build.py; the hook saves on schedule and when a signal asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint import state as states
from erniekit.checkpoint.compress import StoredState
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.probe import Probe, Verdict
from erniekit.checkpoint.shards import write_shards
from erniekit.checkpoint.state import TrainState
from erniekit.devices.base import Device
from erniekit.errors import CheckpointError, Preempted
from erniekit.optim.adamw import AdamW
from erniekit.parallel.engine import Engine
from erniekit.parallel.sharding import Sharding
from erniekit.track import Trackers
from erniekit.train.hooks import Hook
from erniekit.train.step import StepResult

if TYPE_CHECKING:
    from erniekit.train.trainer import Trainer

Tensors = Mapping[str, torch.Tensor]


class Saver:
    def __init__(
        self,
        manager: CheckpointManager,
        engine: Engine,
        optimizer: AdamW,
        device: Device,
        sharding: Sharding,
        probe: Probe | None,
        pieces: Callable[[], Tensors],
        write_weights: Callable[[Path, Tensors], None],
        read_weights: Callable[[Path], None],
        with_optimizer: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """`pieces()` are this rank's parts of the weights to save, by our names; the callables know the format."""
        self.manager, self.engine, self.optimizer, self.device, self.probe = manager, engine, optimizer, device, probe
        self.sharding, self.pieces = sharding, pieces
        self.write_weights, self.read_weights = write_weights, read_weights
        self.with_optimizer, self.extra = with_optimizer, extra or {}
        self.last_saved = -1

    @property
    def setting(self) -> str:
        """Bit-equality of a probe is promised only where this is the same."""
        dtype = str(self.engine.dtype).removeprefix("torch.")
        return f"{self.device.type}/{dtype}/{torch.__version__}/{self.engine.world.layout.describe()}"

    def save(self, state: TrainState, final: bool = False) -> Path | None:
        weights, moments, masters = self.pieces(), {}, {}
        if self.with_optimizer:
            moments, masters = dict(self.optimizer.state_tensors()), dict(self.optimizer.master_tensors())
        if self.manager.async_save and not final:
            weights, moments, masters = (
                {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
                for group in (weights, moments, masters)
            )
        probe = probes.measure(self.engine.logits, self.probe, self.setting) if self.probe else None
        extra = {**self.extra, "random": states.random_states(self.device)}
        frozen = TrainState(**vars(state))

        def write(folder: Path) -> None:
            self.write_weights(folder, weights)
            if moments:
                write_shards(folder, "optimizer", moments.items())
            if masters:
                write_shards(folder, "master_weights", masters.items())
            if probe:
                probes.save(folder, probe)
            states.save(folder, frozen, extra)

        size = sum(t.numel() * t.element_size() for group in (weights, moments, masters) for t in group.values())
        info = {"updates": state.updates, "parts": sorted(k for k, v in {"optimizer": moments}.items() if v)}
        path = self.manager.save(state.step, write, info, expected_bytes=size, final=final)
        if path is not None or self.manager.async_save:
            self.last_saved = state.step
        return path

    def restore(self, folder: Path, restore_random: bool = True) -> tuple[TrainState, Verdict | None]:
        """Everything back in place, whatever layout saved it; the probe must give the saved answer."""
        state, raw = states.load(folder)
        self.read_weights(folder)
        self.optimizer.refresh_masters()
        if self.with_optimizer and state.updates:
            rank = self.engine.world.rank
            moments, masters = (
                StoredState(folder, stem, self.sharding, rank) for stem in ("optimizer", "master_weights")
            )
            missing = self.optimizer.load(state.updates, moments, masters)
            if missing:
                raise CheckpointError(
                    f"the checkpoint has no optimiser state for {len(missing)} tensors, e.g. {missing[0]}",
                    where=str(folder),
                    fix="resume with the settings it was saved with, or set ignore_load_lr_and_optim: True",
                )
        if restore_random:
            states.restore_random(raw["random"], self.device)
        saved = probes.load(folder)
        if saved is None:
            return state, None
        return state, probes.check(self.engine.logits, saved, folder.name, self.setting, self.engine.dtype)


class SaveHook(Hook):
    """Saves every `every` steps (0: never on schedule), and at the end of a step in which a signal came."""

    def __init__(self, saver: Saver, trackers: Trackers, every: int, grace_seconds: float) -> None:
        self.saver, self.trackers, self.every = saver, trackers, every
        self.grace_seconds = grace_seconds

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.saver.manager.check()
        asked = trainer.signals.requested
        if asked:
            self._leave(trainer, asked)
        # Not in the middle of a bad stretch: going back must reach behind it.
        if self.every and result.step % self.every == 0 and not trainer.state.bad_in_a_row:
            self.save(trainer)

    def save(self, trainer: Trainer, final: bool = False) -> Path | None:
        if self.saver.last_saved == trainer.state.step and not final:
            return None
        self.trackers.status("saving")
        path = self.saver.save(trainer.state, final=final)
        self.trackers.status("")
        self.trackers.event(trainer.state.step, "save", str(path) if path else "in the background or failed")
        return path

    def on_end(self, trainer: Trainer) -> None:
        """Whatever the schedule, a run that ends leaves its last step on disk, or fails saying so."""
        self.saver.manager.wait()
        if not (self.saver.manager.output_dir / f"checkpoint-{trainer.state.step}").is_dir():
            self.save(trainer, final=True)

    def _leave(self, trainer: Trainer, signal_name: str) -> None:
        path = self.saver.save(trainer.state, final=True)
        took = time.monotonic() - trainer.signals.requested_at
        late = f"; the save took {took:.0f} s of preempt_grace_s {self.grace_seconds:.0f}"
        text = f"{signal_name}: stopped after step {trainer.state.step}, saved {path}"
        self.trackers.event(trainer.state.step, "stop", text + (late if took > self.grace_seconds else ""))
        raise Preempted(text)


def published_files(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint that make it a model: what the final folder shares with it."""
    state = ("optimizer", "master_weights", "MANIFEST", states.FILE.split(".")[0])
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(state):
            yield path
