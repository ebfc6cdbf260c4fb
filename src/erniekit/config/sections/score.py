"""Models that score a sequence: rewards and classes. Read by recipes/reward.py and score_heads.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class ScoreSection:
    class_labels: tuple[str, ...] = key(
        (),
        "CLS: the classes in their order; default: those of the training rows, sorted.",
        commas=True,
        fixed=True,
    )
    reward_margin: float = key(
        0.0,
        "RM: the chosen answer must be ahead by this times the row's score difference (score_delta, margin or sort).",
        low=0,
        fixed=True,
    )
    center_rewards_coefficient: float = key(
        0.0, "RM: weight of the squared sum of a pair's rewards, which keeps rewards near 0.", low=0, fixed=True
    )
