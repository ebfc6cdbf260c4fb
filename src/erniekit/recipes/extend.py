"""More steps for a run that has some: whether that changes what it has done, and the error where it would.

Called by recipes/resume.py and training.py. The order of the data is a function of seed and position, so only the
learning rate can depend on where a run ends.
"""

from __future__ import annotations

from pathlib import Path

from erniekit.checkpoint import state as states
from erniekit.config import RunConfig
from erniekit.errors import CheckpointError, ConfigError
from erniekit.log import emit
from erniekit.printable import counted
from erniekit.recipes.schedule import make_schedule
from erniekit.train.save import WEIGHTS_ONLY


def same_so_far(cfg: RunConfig, then: int, now: int, step: int) -> bool:
    """Whether a run of `now` steps would have had the same learning rates up to `step` as one of `then` steps: going
    on then gives what one long run gives, bit for bit."""
    if now < step:
        return False
    old, new = make_schedule(cfg, then), make_schedule(cfg, now)
    return all(old.for_update(k) == new.for_update(k) for k in range(1, step + 1))


def check(cfg: RunConfig, name: str, then: int, now: int, step: int) -> None:
    """`name` is a checkpoint at `step` of a run of `then` steps; `now` are requested."""
    if same_so_far(cfg, then, now, step):
        steps = counted(now, "step")
        emit(f"extend   {then:,} -> {steps}; learning rates and data so far are those of one run of {steps}")
        return
    changed = change(cfg, then, now, step)
    if cfg.checkpoint.extend_run:
        emit(f"extend   {then:,} -> {counted(now, 'step')}, as set by extend_run: {changed}")
        return
    raise ConfigError(
        f"{name} is of a run of {counted(then, 'step')}; with {now:,} its learning rate would have been another from "
        "the start",
        where=f"max_steps, num_train_epochs: {changed}",
        fix="set extend_run: True to continue with it, or start again in another output_dir",
    )


def change(cfg: RunConfig, then: int, now: int, step: int) -> str:
    old, new = make_schedule(cfg, then), make_schedule(cfg, now)
    rates = f"{old.for_update(max(1, step)):.3g} at step {step} to {new.for_update(step + 1):.3g} at step {step + 1}"
    return f"the learning rate ({cfg.optim.lr_scheduler_type}) goes from {rates}; the order of the data stays"


def advice(cfg: RunConfig, steps: int, weights_only: str = "") -> str:
    """For a run that has ended: how to go on. weights_only: the name of its checkpoint, if that has no more."""
    keys = [] if same_so_far(cfg, steps, 2 * steps, steps) else ["extend_run=True"]
    keys += ["ignore_load_lr_and_optim=True"] if weights_only else []
    why = f" ({weights_only} holds no optimiser states: they start from zero)" if weights_only else ""
    return "raise max_steps or num_train_epochs" + (f" and set {' '.join(keys)}" if keys else "") + why


def refuse_weights_only(cfg: RunConfig, point: Path | None, now: int) -> None:
    """Of a run of `now` steps (0 or -1: not known yet) whose checkpoint has only weights (save_strategy: no)."""
    if point is None or now <= 0 or cfg.checkpoint.ignore_load_lr_and_optim:
        return
    saved, raw = states.load(point)
    if not raw.get(WEIGHTS_ONLY) or saved.step >= now:
        return
    then = saved.promise.get("max_steps", saved.step)
    free = cfg.checkpoint.extend_run or same_so_far(cfg, then, now, saved.step)
    also = "" if free else " and extend_run=True"
    raise CheckpointError(
        f"{point.name} holds only weights, no optimiser states: its run ended with save_strategy: no",
        where=str(point),
        fix=f"ignore_load_lr_and_optim=True{also} trains on with new optimiser states; a run that is to be extended "
        "keeps them with ignore_save_lr_and_optim: False, or another save_strategy",
    )
