"""Learning rate as a pure function of the step: nothing to save, nothing to drift. Called by train/step.py.

`at` gives the values ERNIEKit's schedulers give at a scheduler step; `for_update` gives the one an update uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE = 0.05  # what is left of the distance to min_lr, before normalising, when a half_life decay ends


@dataclass(frozen=True)
class Schedule:
    kind: str
    peak: float
    total_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0  # cosine floor
    num_cycles: float = 0.5  # cosine
    lr_end: float = 1e-7  # polynomial
    power: float = 1.0  # polynomial
    decay_steps: int | None = None  # where the decay ends; the run's end when not given
    steady_steps: int | None = None  # wsd: the step at which the decay begins; nine tenths of the run when not given
    decay_function: str = "half_life"  # wsd: or "1-sqrt"
    one_step_late: bool = False  # as ERNIEKit: the first update runs at scheduler step 0, i.e. lr 0 with warm-up

    def for_update(self, step: int) -> float:
        """Rate of update number `step` (1-based). Warm-up starts above zero and ends at update `warmup_steps`."""
        if self.one_step_late or self.kind == "constant" or step > self.warmup_steps:
            return self.at(step - 1)
        return self.peak * step / self.warmup_steps

    def at(self, step: int) -> float:
        """Value at scheduler step `step` (0-based)."""
        if self.kind == "constant":
            return self.peak
        if step < self.warmup_steps:
            return self.peak * step / max(1, self.warmup_steps)
        if self.kind == "constant_with_warmup":
            return self.peak
        end = self.decay_steps or self.total_steps
        if self.kind == "polynomial":
            return self._polynomial(step, end)
        if self.kind == "wsd":
            return self._steady_then_decay(step, end)
        progress = (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - progress)
        if progress >= 1.0:
            return self.min_lr
        ratio = max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.num_cycles * 2.0 * progress)))
        return self.min_lr + (self.peak - self.min_lr) * ratio

    def _steady_then_decay(self, step: int, end: int) -> float:
        steady = self.steady_steps if self.steady_steps is not None else int(0.9 * end)
        if step < steady:
            return self.peak
        progress = min(1.0, (step - steady) / max(1, end - steady))
        if self.decay_function == "half_life":
            factor = (HALF_LIFE**progress - HALF_LIFE) / (1 - HALF_LIFE)
        else:
            factor = 1.0 - math.sqrt(progress)
        return self.min_lr + (self.peak - self.min_lr) * factor

    def _polynomial(self, step: int, end: int) -> float:
        if step > end:
            return self.lr_end
        remaining = 1.0 - (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        return (self.peak - self.lr_end) * remaining**self.power + self.lr_end
