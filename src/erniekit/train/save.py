"""Saving a run's whole state and bringing it back: weights, optimiser, counters, generators, and the probe as proof.

Built by recipes/; the hook saves on schedule and on a signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from erniekit.checkpoint import fp8_file
from erniekit.checkpoint import probe as probes
from erniekit.checkpoint import state as states
from erniekit.checkpoint.assembly import ModelFiles
from erniekit.checkpoint.collective import CollectiveSaves, SavedTensors, Whole
from erniekit.checkpoint.compress import StoredState, compressed
from erniekit.checkpoint.manager import TIMED, CheckpointManager
from erniekit.checkpoint.nodes import copier
from erniekit.checkpoint.probe import Answer, Probe, Verdict
from erniekit.checkpoint.shards import write_shards
from erniekit.checkpoint.state import TrainState
from erniekit.devices.base import Device
from erniekit.errors import CheckpointError, Preempted
from erniekit.log import emit
from erniekit.model_contract import spread
from erniekit.optim.adamw import AdamW
from erniekit.parallel.compiled import eager
from erniekit.parallel.engine import Engine
from erniekit.parallel.sharding import Sharding
from erniekit.printable import counted
from erniekit.track import Trackers
from erniekit.train.agreement import agree_on_stop, agree_on_stop_or_save
from erniekit.train.fp8_scales import StaticScales
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult

Tensors = Mapping[str, torch.Tensor]
WEIGHTS_ONLY = "weights_alone"  # in state.json: the end of a run without checkpoints


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
        compress: str = "O0",
        with_masters: bool = True,
        rebuild_masters: bool = False,
        copy_to: Sequence[int] = (),
        frozen_base: str = "",
        launch: str = "",
        scales: StaticScales | None = None,
        clear_scales: bool = False,
        extra_files: Mapping[str, bytes] | None = None,
        model_files: ModelFiles | None = None,
    ) -> None:
        """`pieces()` are this rank's parts of the weights to save, by our names; the callables have the format.

        compress: O1 or O2 store the moments in 8 or 4 bit. with_masters=False leaves the fp32 weights out of a 16-bit
        model's checkpoint; rebuild_masters lets a resume make them from the 16-bit ones. None of these is bit-exact.
        copy_to: a rank of each node that is to have the checkpoints on its own disk as well.
        frozen_base: the kind that frozen weights are packed in; a probe over such a base records it.
        launch: goes into every manifest, so that a restart of that launch finds what it saved.
        scales: of FP8 training; clear_scales: a resume keeps the new ones.
        beside: small files that go with the weights. model_files: how all ranks write the weights together.
        """
        self.launch, self.scales, self.clear_scales = launch, scales, clear_scales
        self.model_files = model_files
        self.frozen_base, self.extra_files = frozen_base, dict(extra_files or {})
        self.manager, self.engine, self.optimizer, self.device, self.probe = manager, engine, optimizer, device, probe
        self.sharding, self.pieces = sharding, pieces
        self.write_weights, self.read_weights = write_weights, read_weights
        self.with_optimizer, self.extra = with_optimizer, extra or {}
        self.compress, self.with_masters, self.rebuild_masters = compress, with_masters, rebuild_masters
        self.world = engine.world
        # Saves in the background communicate while training does: on a group of their own.
        group = self.world.new_host_group()
        after = copier(manager, copy_to, self.world.rank, group)
        self.saves = CollectiveSaves(manager, self.world, sharding, device, group, after)
        self.last_saved = -1
        self.weights_only = False  # whether what was restored last was saved without optimiser state
        self.before: Callable[[int], None] | None = None  # called with a step that is to be saved; may raise

    @property
    def setting(self) -> str:
        """Bit-equality of a probe is promised only where this is the same."""
        dtype = str(self.engine.dtype).removeprefix("torch.")
        base = f"/{self.frozen_base}{probes.PACKED_BASE}" if self.frozen_base else ""
        return f"{self.device.type}/{dtype}/{torch.__version__}/{self.engine.world.layout.describe()}{base}"

    def save(
        self, state: TrainState, final: bool = False, timed: bool = False, weights_only: bool = False
    ) -> Path | None:
        """All ranks together; the folder, or None when it failed and training goes on, or is being written. timed: it
        is on no schedule, so that rotation need not keep it. weights_alone: nothing is trained on from it."""
        if self.before is not None:
            self.before(state.step)
        pieces: dict[str, Tensors] = {"weights": self.pieces()}
        if self.with_optimizer and not weights_only:
            pieces["optimizer"] = dict(self.optimizer.state_tensors())
            pieces["master_weights"] = dict(self.optimizer.master_tensors()) if self.with_masters else {}
        probe = probes.measure(self._forward(self.probe), self.probe, self.setting) if self.probe else None
        extra = {**self.extra, "random": states.random_states(self.device), "optimizer": self.optimizer.numbers()}
        extra |= {WEIGHTS_ONLY: True} if weights_only else {}
        frozen = TrainState(**vars(state))
        scales = self.scales.saved() if self.scales is not None else None

        def write(folder: Path, whole: Mapping[str, Whole]) -> None:
            self.write_weights(folder, _FiniteWeights(whole["weights"], frozen.step))
            for stem, stage in (("optimizer", self.compress), ("master_weights", "O0")):
                tensors = whole.get(stem)
                # Codes of compressed moments are made of whole rows.
                if tensors and (stage != "O0" or not tensors.write_parts(folder, stem)):
                    write_shards(folder, stem, compressed(tensors.items(), stage), lasting=True)
            if scales is not None:
                fp8_file.save(folder, scales)
            if probe:
                probes.save(folder, probe)
            for name, content in self.extra_files.items():
                (folder / name).write_bytes(content)
            states.save(folder, frozen, extra)

        info: dict[str, Any] = {"updates": state.updates, "layout": self.engine.world.layout.describe()}
        info |= {"launch": self.launch} if self.launch else {}
        info |= {TIMED: True} if timed else {}
        model = self.model_files and replace(self.model_files, check=partial(_check_finite, state.step))
        path = self.saves.save(state.step, pieces, write, info, final=final, model=model)
        if path is not None or self.manager.async_save:
            self.last_saved = state.step
        return path

    def restore(self, folder: Path, restore_random: bool = True) -> tuple[TrainState, Verdict | None]:
        """Everything back in place, whatever layout saved it; the probe must give the saved result."""
        state, raw = states.load(folder)
        self.read_weights(folder)
        self.optimizer.refresh_masters()
        if self.scales is not None:
            self.scales.restore(folder, keep_inputs=self.clear_scales)
        self.weights_only = bool(raw.get(WEIGHTS_ONLY))
        if self.with_optimizer and state.updates and not self.weights_only:
            self._restore_optimizer(folder, state.updates)
            self.optimizer.load_numbers(raw["optimizer"])
        if restore_random:
            states.restore_random(raw["random"], self.device)
        saved = probes.load(folder, spread(self.engine.model).config)
        if saved is None or (self.scales is not None and self.clear_scales):
            return state, None  # with other scales the outputs differ
        answer, dtype = self._forward(saved), self.engine.dtype
        return state, probes.check(answer, saved, folder.name, self.setting, dtype, where=str(folder))

    def _forward(self, probe: Probe) -> Answer:
        if probe.picture is None:
            return self.engine.logits
        engine, count = self.engine, probe.ids.shape[1]

        def logits_of(_: torch.Tensor, **__: Any) -> torch.Tensor:
            was_training = engine.model.training
            engine.train(False)
            with eager():
                out = engine.answer(probe.batch(-(-count // engine.length_multiple) * engine.length_multiple))
            engine.train(was_training)
            return out[:, :count]

        return logits_of

    def _restore_optimizer(self, folder: Path, updates: int) -> None:
        """This rank's part of the moments and the fp32 weights; prints a note where they are not the ones that were
        saved."""
        moments = StoredState(folder, "optimizer", self.sharding, self.world.rank)
        masters: Tensors = StoredState(folder, "master_weights", self.sharding, self.world.rank)
        if self.rebuild_masters and self.optimizer.has_masters and not len(masters):
            masters = dict(self.optimizer.master_tensors())  # they follow the weights just read
            emit(f"note     {folder.name} has no fp32 weights: made from the 16-bit ones, so not bit for bit as saved")
        if moments.is_compressed:
            emit(
                f"note     {folder.name} has compressed moments (ckpt_quant_stage): close to, not bit for bit as saved"
            )
        missing = self.optimizer.load(updates, moments, masters)
        if missing:
            raise CheckpointError(
                f"the checkpoint has no optimiser state for {counted(len(missing), 'tensor')}, e.g. {missing[0]}",
                where=str(folder),
                fix="resume with the settings it was saved with, or set ignore_load_lr_and_optim: True",
            )


def _check_finite(step: int, name: str, tensor: torch.Tensor) -> None:
    """Weights that are not numbers are refused: a run that goes back must find sound ones, and one that ends must not
    leave them as its result."""
    # The smallest and the largest carry a NaN or an infinity, and are no copy of the tensor.
    if tensor.numel() and not all(bool(end.isfinite()) for end in tensor.aminmax()):
        raise CheckpointError(
            f"checkpoint-{step} was not written: {name} holds values that are not numbers",
            fix="the same command resumes from the checkpoint before; lower learning_rate, or test the memory",
        )


class _FiniteWeights(SavedTensors):
    """Weights on their way to disk, checked."""

    def __init__(self, tensors: SavedTensors, step: int) -> None:
        self.tensors, self.step = tensors, step

    def write_files(self, folder: Path, stem: str) -> torch.dtype | None:
        return self.tensors.write_files(folder, stem)  # every rank checks those that it writes

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        _check_finite(self.step, name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class SaveHook(Hook):
    """Saves every `every` steps (0: never on schedule), when `minutes` have passed since the last save (0: never), and
    at the end of a step in which a signal came. The first rank's clock decides for all."""

    def __init__(
        self,
        saver: Saver,
        trackers: Trackers,
        every: int,
        grace_seconds: float,
        minutes: float = 0.0,
        end_with_weights_only: bool = False,
    ) -> None:
        """end_with_weights_alone: the save at the run's end is for its model, not to train on from."""
        self.end_with_weights_only = end_with_weights_only
        self.saver, self.trackers, self.every, self.minutes = saver, trackers, every, minutes
        self.grace_seconds = grace_seconds
        self._saved_at = time.monotonic()

    def on_start(self, trainer: TrainingLoop) -> None:
        self._saved_at = time.monotonic()

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        """The same on all ranks: one that waits would save, or agree on a stop, without the others."""
        if self._scheduled(step):
            return True
        stop_signal, timed = agree_on_stop_or_save(trainer.signals.requested, self._time_is_up(), self.saver.world)
        return stop_signal is not None or timed

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.saver.saves.check()
        self._tell_failed()
        if trainer.ahead:  # a signal that came meanwhile: the weights are the next step's, which waits for it
            return
        stop_signal, timed = agree_on_stop_or_save(trainer.signals.requested, self._time_is_up(), self.saver.world)
        if stop_signal:
            self.leave(trainer, stop_signal)
        # Not in the middle of a bad stretch: going back must reach behind it.
        scheduled = self._scheduled(result.step)
        if (scheduled or timed) and not trainer.state.bad_in_a_row:
            self.save(trainer, timed=not scheduled)
            if stop_signal := agree_on_stop(trainer.signals.requested, self.saver.world):  # while it was written
                self.leave(trainer, stop_signal)

    def _scheduled(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def _time_is_up(self) -> bool:
        waited = time.monotonic() - self._saved_at
        return 0 < self.minutes * 60 <= waited and self.saver.world.is_main

    def save(self, trainer: TrainingLoop, final: bool = False, timed: bool = False) -> Path | None:
        if self.saver.last_saved == trainer.state.step and not final:
            return None
        trainer.phase("save")
        self.trackers.status("saving")
        path = self.saver.save(trainer.state, final, timed, weights_only=final and self.end_with_weights_only)
        self._tell_failed()  # this one, or one in the background that it waited for
        self._saved_at = time.monotonic()
        self.trackers.status("")
        trainer.phase("hooks")
        if path is not None or self.saver.saves.in_flight:
            self.trackers.event(trainer.state.step, "save", str(path or "in the background"))
        return path

    def _tell_failed(self) -> None:
        """One that is in the background fails after its event."""
        for step, what in self.saver.saves.failed:
            self.trackers.event(step, "not saved", what)
        self.saver.saves.failed.clear()

    def on_end(self, trainer: TrainingLoop) -> None:
        """Whatever the schedule, a run that ends leaves its last step on disk, or fails with an error."""
        if not self._is_saved(trainer.state.step):
            self.save(trainer, final=True)

    def leave(self, trainer: TrainingLoop, signal_name: str) -> NoReturn:
        """After a signal, on all ranks: saves this step unless that has been done, and ends the run."""
        trainer.phase("save")
        requested_at = trainer.signals.requested_at or time.monotonic()  # by its own signal, or now by another rank
        path: Path | None = self.saver.manager.output_dir / f"checkpoint-{trainer.state.step}"
        if self.saver.last_saved != trainer.state.step or not self._is_saved(trainer.state.step):
            path = self.saver.save(trainer.state, final=True)
        took = time.monotonic() - requested_at
        late = f"; from the signal to the end of the save: {took:.0f} s of preempt_grace_s {self.grace_seconds:.0f}"
        text = f"{signal_name}: stopped after step {trainer.state.step}, saved {path}"
        text += late if took > self.grace_seconds else ""
        self.trackers.event(trainer.state.step, "signal", text)
        raise Preempted(text)

    def _is_saved(self, step: int) -> bool:
        self.saver.saves.wait()
        self._tell_failed()
        return self.saver.saves.published(step)
