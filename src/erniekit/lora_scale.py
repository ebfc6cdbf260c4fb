"""How LoRA's keys become a scale: what lora_alpha -1 stands for, what rslora and rslora_plus change. No torch in here.

Read by config/rules (keys), lora/settings.py (adapters in memory) and lora's files (adapters of other toolkits).
"""

from __future__ import annotations

import math

DERIVED_ALPHA = -1  # the value of lora_alpha that selects `default_alpha`
RSLORA_ALPHA = 4
# The keys that rslora_plus: True sets.
RSLORA_PLUS = {"rslora": True, "lora_plus_scale": 4.0, "lora_alpha": RSLORA_ALPHA}


def default_alpha(rank: int, rslora: bool) -> tuple[int, str]:
    """lora_alpha where none is given, and why."""
    return (RSLORA_ALPHA, "rslora is True") if rslora else (2 * rank, "2 x lora_rank")


def scale_of(alpha: float, rank: int, rslora: bool) -> float:
    """What B A x is multiplied by."""
    return alpha / _divisor(rank, rslora)


def alpha_of(scale: float, rank: int, rslora: bool) -> float:
    """The alpha that gives this scale."""
    return scale * _divisor(rank, rslora)


def _divisor(rank: int, rslora: bool) -> float:
    return math.sqrt(rank) if rslora else rank
