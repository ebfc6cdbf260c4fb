"""Going on where a run stopped: which checkpoint, whether it may be continued, and the proof that it came back whole.

Called by recipes/training.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.checkpoint import state as states
from erniekit.checkpoint.identity import model_identity
from erniekit.checkpoint.manager import CheckpointManager, step_of
from erniekit.checkpoint.manifest import Damaged
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.nodes import agree_on_checkpoint, nodes_without, together
from erniekit.checkpoint.state import TrainState
from erniekit.config import RunConfig
from erniekit.data import cache_versions
from erniekit.errors import CheckpointError, ConfigError
from erniekit.log import emit, warn
from erniekit.parallel.mesh import World
from erniekit.printable import counted
from erniekit.recipes import extend
from erniekit.recipes.changes import (
    BASE,
    MODEL_CONFIG,
    TRAIN_DATA,
    describe_changes,
    other_states,
    other_weights,
)
from erniekit.recipes.datasets import TrainData
from erniekit.train.save import Saver

ALONE = "put them back; as they are only another output_dir helps: the same command with output_dir=OTHER"
ELSEWHERE = "a run of its own: the same command with output_dir=OTHER"
DEALT = ("batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
NEEDS_BASE = ("stage", "fine_tuning", "loss_type", "reference_free")  # keys that decide whether a run stores its base


@dataclass(frozen=True)
class Disks:
    """Whether all nodes share one output folder; `without`: a rank of each node that does not have rank 0's."""

    output: Path
    without: list[int]

    @property
    def shared(self) -> bool:
        return not self.without


def look_at_disks(output: Path, world: World) -> Disks:
    return Disks(output, nodes_without(output, world.leaders, world.rank, world.control))


def find(cfg: RunConfig, manager: CheckpointManager, world: World, disks: Disks, launch: str = "") -> Path | None:
    """The requested folder, or the newest good checkpoint of output_dir, on every node; None starts afresh.

    launch: of the command this process belongs to. Once it has saved, a restart goes on from what it saved last:
    resume_from_checkpoint and overwrite_output_dir said where the command begins.
    """
    requested = cfg.checkpoint.resume_from_checkpoint
    named = requested if requested and str(requested).lower() not in ("true", "false", "none") else None
    afresh = not named and cfg.checkpoint.overwrite_output_dir

    def here() -> Path | None:
        if launch and (named or afresh) and (own := manager.latest_good(launch)) is not None:
            key = "resume_from_checkpoint" if named else "overwrite_output_dir"
            emit(f"note     a restart of this run: {key} took effect when it began; it resumes from {own.name}")
            return own
        if afresh:
            return None
        if not named:
            return manager.latest_good()
        path = Path(named).expanduser()
        if not path.is_dir():
            raise CheckpointError(
                f"no such checkpoint: {named}", where="resume_from_checkpoint", fix="check the path, or leave it out"
            )
        try:
            manager.verify(path)
        except Damaged as error:
            raise Damaged(error.what, where=error.where, fix=_instead_of(path)) from error
        return path

    point = same_everywhere(here, world, disks)
    on_every_disk(lambda: manager.refuse_foreign(point), world, disks)
    if point is not None and cfg.checkpoint.override_resume:
        _refuse_other_weights(cfg, point)
    return point


def _refuse_other_weights(cfg: RunConfig, point: Path) -> None:
    """Before data is prepared: the other changes are described once it is known, and may be overridden."""
    saved, now = states.load(point)[0].promise, cfg.resume_keys()
    if names := other_weights(saved, now):
        raise ConfigError(
            f"{point.name} holds other weights than this run would train, which override_resume cannot change",
            where="; ".join(describe_changes(saved, {name: now[name] for name in names}, ())),
            fix=ALONE,
        )


def _instead_of(damaged: Path) -> str:
    older = CheckpointManager(damaged.parent).newest_whole(before=step_of(damaged))
    if older is None or older == damaged:
        return "put a good copy of it back, or resume from another checkpoint"
    return f"put a good copy of it back, or resume from the one before: resume_from_checkpoint={older}"


def begin(saver: Saver, point: Path | None, disks: Disks) -> None:
    """Nothing refuses the run any more: checkpoints of other branches and runs make way, and are kept."""
    on_every_disk(lambda: saver.manager.begin(point), saver.world, disks)


def on_every_disk(work: Callable[[], None], world: World, disks: Disks) -> None:
    """Once for each output folder there is; all ranks call it, and a failure is every rank's."""
    writes = world.is_main or world.rank in disks.without
    together(work if writes else lambda: None, world.control)


def same_everywhere(look: Callable[[], Path | None], world: World, disks: Disks) -> Path | None:
    """All ranks go on from one checkpoint; nodes that lack it receive it."""
    return agree_on_checkpoint(look, disks.output, world.leaders, world.rank, world.control, shared=disks.shared)


def promises(cfg: RunConfig, data: TrainData, folder: ModelFolder, base: str | None) -> dict[str, Any]:
    """What decides the next step's numbers: fixed keys, the steps a schedule decays over, the packs of a step, the data
    itself, its order, and the model's config. How a step's packs are dealt to ranks and micro-batches does not.

    base: identity of the model below the adapters, or of the reference, where there is one."""
    keys = {key: value for key, value in cfg.resume_keys().items() if key not in DEALT}
    out = {
        **keys,
        "max_steps": data.max_steps,
        "packs a step (batch_size x gradient_accumulation_steps x data ranks)": data.packs_per_step,
        TRAIN_DATA: data.fingerprints(),
        "version of the data's order": cache_versions.ORDER,
        MODEL_CONFIG: model_identity(folder.path, weights=False),
    }
    return out if base is None else {**out, BASE: base}


def check_promises(cfg: RunConfig, point: Path | None, promise: dict[str, Any], data: TrainData) -> None:
    if point is None:
        return
    extend.refuse_weights_only(cfg, point, data.max_steps)
    saved, _ = states.load(point)
    old, new = saved.promise, promise
    unknown = [key for key in new if key not in old]
    if BASE in unknown and any(old.get(key) != new.get(key) for key in NEEDS_BASE):
        unknown.remove(BASE)  # that run needed none
    if unknown:
        emit(f"note     {point.name} is of another version, and these could not be compared: {', '.join(unknown)}")
    then, now = old.get("max_steps", data.max_steps), data.max_steps
    apart = {"max_steps"}  # compared below: more of them need not change anything
    if not cfg.given("decay_steps") and old.get("decay_steps") in (None, then):
        apart.add("decay_steps")  # which is max_steps, then and now
    compared = {key: value for key, value in new.items() if key not in apart}
    if TRAIN_DATA in old:  # what follows from a key that is named below is no change of the data
        compared[TRAIN_DATA] = data.fingerprints(old)
    changed = describe_changes(old, compared, cfg.data.train_dataset_path)
    if then < now and not changed and not cfg.checkpoint.override_resume:
        extend.check(cfg, point.name, then, now, saved.step)
    elif then != now and not extend.same_so_far(cfg, then, now, saved.step):
        changed.append(f"max_steps: {then} -> {now}")
    if not changed:
        _print_rewritten(saved.written, data)
        return
    if saved.step >= now and point.parent.resolve() == Path(cfg.train.output_dir or "output").expanduser().resolve():
        raise ConfigError(
            "this run is finished: with other settings nothing would be trained, and its records would be false",
            where="; ".join(changed),
            fix=f"put them back, or raise max_steps to train on; {ELSEWHERE}",
        )
    if cfg.checkpoint.override_resume:
        warn(f"resuming {point.name} with other settings, as set by override_resume: {'; '.join(changed)}")
        return
    raise ConfigError(
        f"{point.name} was trained with other settings, so going on would not be the same run",
        where="; ".join(changed),
        fix=_way_on(cfg, old, new),
    )


def _way_on(cfg: RunConfig, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What there is besides a run of its own, where settings have changed."""
    differ = {key for key in now if key in saved and saved[key] != now[key]}
    other_base = BASE in differ and cfg.lora.lora  # else it is a reference only: the weights are the checkpoint's
    if other_weights(saved, now) or other_base or MODEL_CONFIG in differ:
        return ALONE
    if other_states(saved, now) and not cfg.checkpoint.ignore_load_lr_and_optim:
        anyway = "and ignore_load_lr_and_optim: True to resume with new optimiser states"
    else:
        anyway = "to resume anyway"
    return f"put them back, or set override_resume: True {anyway}; {ELSEWHERE}"


def _print_rewritten(saved: dict[str, int], data: TrainData) -> None:
    for name, when in data.written().items():
        if saved.get(name, when) != when:
            warn(
                f"{name} has another date than when the checkpoint was saved. It is too large to be read at every "
                "start: its size and 64 MiB in blocks over all of it are unchanged, the rest was not compared"
            )


def restore(cfg: RunConfig, saver: Saver, point: Path | None, data: TrainData, promise: dict[str, Any]) -> TrainState:
    state = TrainState()
    if point is not None:
        saver.with_optimizer = saver.with_optimizer and not cfg.checkpoint.ignore_load_lr_and_optim
        state, verdict = saver.restore(point)
        saver.with_optimizer = not cfg.checkpoint.ignore_save_lr_and_optim
        proof = f"; {verdict.line()}" if verdict else ""
        emit(f"resume   {point} at step {state.step} of {data.max_steps}{proof}")
        if state.step >= data.max_steps:
            alone = point.name if saver.weights_only else ""
            emit(f"note     this run is finished; to train on, {extend.advice(cfg, data.max_steps, alone)}")
        if state.best_step is not None and cfg.checkpoint.load_best_model_at_end:
            protect_best(saver, state)
        saver.last_saved = state.step
    state.promise, state.written = promise, data.written()
    return state


def protect_best(saver: Saver, state: TrainState) -> None:
    """Rotation spares the best; one that is not there (its save failed, or it was deleted) cannot be the best."""
    if saver.saves.published(state.best_step or 0):
        saver.manager.protect(state.best_step)
        return
    warn(f"the best checkpoint, checkpoint-{state.best_step}, is not in output_dir: the best one is determined again")
    state.best_metric, state.best_step, state.evals_without_gain = None, None, 0


def roll_back(saver: Saver, state: TrainState, disks: Disks) -> None:
    """Non-finite losses in a row: weights and optimiser as they were last saved."""
    point = same_everywhere(saver.manager.latest_good, saver.world, disks)
    if point is None:
        raise CheckpointError(
            f"{counted(state.bad_in_a_row, 'step')} in a row gave a loss that is not a number, and there is no "
            "checkpoint yet",
            where=f"step {state.step}",
            fix="lower learning_rate, look at the data, or train in fp32 (compute_type: fp32)",
        )
    saved, _ = saver.restore(point)
    warn(f"going back to {point.name} and skipping the data since")
    for name, value in vars(saved).items():
        if name not in ("promise", "written"):  # these are of this run, which may have been extended
            setattr(state, name, value)
