"""Going on where a run stopped: which checkpoint, whether it may be continued, and the proof that it came back whole.

Called by recipes/fit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.checkpoint import state as states
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.nodes import agree_on_checkpoint, nodes_without, together
from erniekit.checkpoint.state import TrainState
from erniekit.config import RunConfig
from erniekit.errors import CheckpointError, ConfigError
from erniekit.log import say, warn
from erniekit.parallel.mesh import World
from erniekit.recipes.datasets import TrainData
from erniekit.train.save import Saver

DEALT = ("batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Disks:
    """Whether all nodes see one output folder; `without`: a rank of each node that does not see rank 0's."""

    output: Path
    without: list[int]

    @property
    def shared(self) -> bool:
        return not self.without


def look_at_disks(output: Path, world: World) -> Disks:
    return Disks(output, nodes_without(output, world.leaders, world.rank, world.control))


def find(cfg: RunConfig, manager: CheckpointManager, world: World, disks: Disks, launch: str = "") -> Path | None:
    """The folder asked for, or the newest good checkpoint of output_dir, on every node; None starts afresh.

    launch: of the command this process belongs to. Once it has saved, a restart goes on from what it saved last:
    resume_from_checkpoint and overwrite_output_dir said where the command begins.
    """
    asked = cfg.checkpoint.resume_from_checkpoint
    named = asked if asked and str(asked).lower() not in ("true", "false", "none") else None
    afresh = not named and cfg.checkpoint.overwrite_output_dir

    def here() -> Path | None:
        if launch and (named or afresh) and (own := manager.latest_good(launch)) is not None:
            key = "resume_from_checkpoint" if named else "overwrite_output_dir"
            say(f"note     a restart of this run: {key} acted when it began, it goes on from {own.name}")
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
        manager.verify(path)
        return path

    point = same_everywhere(here, world, disks)
    on_every_disk(lambda: manager.refuse_foreign(point), world, disks)
    return point


def begin(saver: Saver, point: Path | None, disks: Disks) -> None:
    """Nothing refuses the run any more: checkpoints of other branches and runs make way, and are kept."""
    on_every_disk(lambda: saver.manager.begin(point), saver.world, disks)


def on_every_disk(work: Callable[[], None], world: World, disks: Disks) -> None:
    """Once for each output folder there is; all ranks call it, and a failure is every rank's."""
    mine = world.is_main or world.rank in disks.without
    together(work if mine else lambda: None, world.control)


def same_everywhere(look: Callable[[], Path | None], world: World, disks: Disks) -> Path | None:
    """All ranks go on from one checkpoint; nodes that lack it receive it."""
    return agree_on_checkpoint(look, disks.output, world.leaders, world.rank, world.control, shared=disks.shared)


def promises(cfg: RunConfig, data: TrainData) -> dict[str, Any]:
    """What decides the next step's numbers: fixed keys, the steps a schedule decays over, the packs of a step and the
    data itself. How a step's packs are dealt to ranks and micro-batches does not."""
    keys = {key: value for key, value in cfg.resume_keys().items() if key not in DEALT}
    return {
        **keys,
        "max_steps": data.max_steps,
        "packs a step (batch_size x gradient_accumulation_steps x data ranks)": data.packs_per_step,
        "train data": data.fingerprints(),
    }


def check_promises(cfg: RunConfig, point: Path | None, data: TrainData) -> None:
    if point is None:
        return
    saved, _ = states.load(point)
    changed = states.changed_promises(saved.promise, promises(cfg, data))
    if not changed:
        return
    if cfg.checkpoint.override_resume:
        warn(f"resuming {point.name} with other settings, as override_resume asks: {'; '.join(changed)}")
        return
    raise ConfigError(
        f"{point.name} was trained with other settings, so going on would not be the same run",
        where="; ".join(changed),
        fix="put them back, or set override_resume: True to go on anyway, or choose another output_dir",
    )


def restore(cfg: RunConfig, saver: Saver, point: Path | None, data: TrainData) -> TrainState:
    state = TrainState()
    if point is not None:
        saver.with_optimizer = saver.with_optimizer and not cfg.checkpoint.ignore_load_lr_and_optim
        state, verdict = saver.restore(point)
        saver.with_optimizer = not cfg.checkpoint.ignore_save_lr_and_optim
        proof = f"; {verdict.line()}" if verdict else ""
        say(f"resume   {point} at step {state.step} of {data.max_steps}{proof}")
        if state.step >= data.max_steps:
            say("note     this run is finished; to train on, raise max_steps and set override_resume=True")
        if state.best_step is not None and cfg.checkpoint.load_best_model_at_end:
            protect_best(saver, state)
        saver.last_saved = state.step
    state.promise = promises(cfg, data)
    return state


def protect_best(saver: Saver, state: TrainState) -> None:
    """Rotation spares the best; one that is not there (its save failed, or it was deleted) cannot be the best."""
    if saver.saves.published(state.best_step or 0):
        saver.manager.protect(state.best_step)
        return
    warn(f"the best checkpoint, checkpoint-{state.best_step}, is not in output_dir: what is best is found anew")
    state.best_metric, state.best_step, state.evals_without_gain = None, None, 0


def roll_back(saver: Saver, state: TrainState, disks: Disks) -> None:
    """Non-finite losses in a row: weights and optimiser as they were last saved."""
    point = same_everywhere(saver.manager.latest_good, saver.world, disks)
    if point is None:
        raise CheckpointError(
            f"{state.bad_in_a_row} steps in a row gave a loss that is not a number, and there is no checkpoint yet",
            where=f"step {state.step}",
            fix="lower learning_rate, look at the data, or train in fp32 (compute_type: fp32)",
        )
    saved, _ = saver.restore(point)
    warn(f"going back to {point.name} and skipping the data since")
    for name, value in vars(saved).items():
        setattr(state, name, value)
