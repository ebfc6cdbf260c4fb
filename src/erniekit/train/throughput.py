"""Throughput: what `sft_benchmark` and `dpo_benchmark` print at a run's end. Put in by the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.log import emit
from erniekit.parallel.mesh import World
from erniekit.train.hooks import Hook, TrainingLoop

if TYPE_CHECKING:
    from erniekit.train.step import StepResult


class Throughput(Hook):
    """Padding apart; the first step warms up."""

    def __init__(self, world: World) -> None:
        self.world, self.tokens, self.began, self.ended = world, 0, 0.0, 0.0

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        if self.began:
            self.tokens += result.tokens
        else:
            self.began = result.finished_at
        self.ended = result.finished_at

    def on_end(self, trainer: TrainingLoop) -> None:
        seconds = self.ended - self.began
        rate = self.tokens / seconds if self.tokens else 0.0
        emit(f"benchmark {rate:,.0f} effective tokens/s, {rate / self.world.size:,.0f} a device, over {seconds:.1f} s")
