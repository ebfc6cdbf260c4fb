"""When a run saves, beside its steps: by time, and at its end. Used by training.py and run_summary.py."""

from __future__ import annotations

from erniekit.config import RunConfig


def minutes_between_saves(cfg: RunConfig) -> float:
    """0: never by time. `save_strategy: no` asks for no saves on the way, unless save_minutes itself was given."""
    c = cfg.checkpoint
    return c.save_minutes if c.save_strategy != "no" or cfg.given("save_minutes") else 0.0


def ends_with_weights_alone(cfg: RunConfig) -> bool:
    """`save_strategy: no` asks for a model and nothing to train on from, unless keys that are given say otherwise."""
    asked = cfg.given("save_minutes") or cfg.given("ignore_save_lr_and_optim")
    return cfg.checkpoint.save_strategy == "no" and not asked
