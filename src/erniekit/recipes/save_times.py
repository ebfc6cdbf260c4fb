"""When a run saves, besides its steps: by time, and at its end. Used by training.py and run_summary.py."""

from __future__ import annotations

from erniekit.config import RunConfig


def minutes_between_saves(cfg: RunConfig) -> float:
    """0: never by time. `save_strategy: no` means no saves on the way, unless save_minutes itself was given."""
    c = cfg.checkpoint
    return c.save_minutes if c.save_strategy != "no" or cfg.given("save_minutes") else 0.0


def ends_with_weights_only(cfg: RunConfig) -> bool:
    """`save_strategy: no` means a model and nothing to resume from, unless other given keys contradict it."""
    requested = cfg.given("save_minutes") or cfg.given("ignore_save_lr_and_optim")
    return cfg.checkpoint.save_strategy == "no" and not requested
