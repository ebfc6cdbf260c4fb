"""The learning rate's schedule out of the config. Called by training.py, and by extend.py to compare two of them."""

from __future__ import annotations

from erniekit.config import RunConfig
from erniekit.optim.schedule import Schedule


def make_schedule(cfg: RunConfig, max_steps: int) -> Schedule:
    o = cfg.optim
    return Schedule(
        kind=o.lr_scheduler_type,
        peak=o.learning_rate,
        total_steps=max_steps,
        warmup_steps=o.warmup_steps or int(o.warmup_ratio * max_steps + 0.999999),
        min_lr=o.min_lr,
        num_cycles=o.num_cycles,
        lr_end=o.lr_end,
        power=o.power,
        decay_steps=o.decay_steps if cfg.given("decay_steps") else None,  # a derived one is max_steps
        steady_steps=_steady_steps(o.lr_scheduler),
        decay_function=o.decay_function,
        one_step_late=cfg.compat.learning_rate_one_step_late,
    )


def _steady_steps(lr_scheduler: str | None) -> int | None:
    """`lr_scheduler: wsd:600` holds the peak until step 600."""
    kind, _, steps = (lr_scheduler or "").partition(":")
    return int(steps) if kind == "wsd" and steps else None
