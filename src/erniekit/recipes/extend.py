"""More steps for a run that has some: whether that changes what it has done, and the error where it would.

Called by recipes/resume.py. The order of the data is a function of seed and position, so only the learning rate can
depend on where a run ends.
"""

from __future__ import annotations

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.log import emit
from erniekit.printable import counted
from erniekit.recipes.schedule import make_schedule


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


def advice(cfg: RunConfig, steps: int) -> str:
    """For a run that has ended: how to go on."""
    free = same_so_far(cfg, steps, 2 * steps, steps)
    return "raise max_steps or num_train_epochs" + ("" if free else " and set extend_run=True")
