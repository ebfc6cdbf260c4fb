"""The numbers of a logged step, with ERNIEKit's names: loss, rates, memory, and the share of the card's peak (MFU).

Used as a hook by recipes/; everything goes to the trackers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from erniekit.data.types import PictureCounts
from erniekit.devices.base import Device
from erniekit.models import vision_costs
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import TokenCounts, mfu, step_flops
from erniekit.models.layers.vision_language import TOKENS
from erniekit.models.vision_costs import Patches
from erniekit.track import Trackers
from erniekit.train.data_wait import DataWait
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.step import StepResult

RECORDS = 1000  # the latest, of whose speeds the median is taken


@dataclass(frozen=True)
class VisionTraining:
    """How a vision model is trained, as far as its FLOPs follow from it. kept: what of pictures that were encoded
    before is here, the tower's output or the resampler's; empty: none."""

    tower_trained: bool
    resampler_trained: bool
    adapted: bool
    adapters: int = 0  # LoRA weights that a vision token meets in the decoder
    kept: str = ""

    def flops(self, c: DecoderConfig, shown: PictureCounts) -> float:
        merged, tokens = shown.patches, shown.features
        if self.kept == TOKENS:
            merged, tokens = shown.encoded_patches, shown.encoded_features
        counts = Patches(shown.encoded_patches, shown.squares, tokens, merged)
        return vision_costs.step_flops(c, counts, self.tower_trained, self.resampler_trained, self.adapted)


class StepStatistics(NamedTuple):
    """Of the steps of a run: what a plan did not know before."""

    speed: float  # tokens a second, the median of its records after the first
    pack: float  # tokens
    document: float  # tokens, each token's own counted
    trained: float  # share of tokens with a label


class LogHook(Hook):
    """Every `every` steps: one record to the trackers. Skipped steps are events."""

    def __init__(
        self,
        trackers: Trackers,
        device: Device,
        config: DecoderConfig,
        dtype: torch.dtype,
        every: int,
        packs_per_step: int,
        packs_per_epoch: int,
        frozen_base: bool,
        first: bool = False,
        ranks: int = 1,
        further: int = 0,
        also: Callable[[], dict[str, float]] | None = None,
        perplexity: bool = True,
        adapters: int = 0,
        live_reference: bool = False,
        vision_training: VisionTraining | None = None,
    ) -> None:
        """every 0: only the last step. `first`: step 1 whatever `every` is. frozen_base, further, adapters and
        live_reference: as in models/costs.step_flops. also: further numbers for each record.
        perplexity: whether the loss has one. vision_training: of a vision-language model."""
        self.trackers, self.device, self.config, self.dtype = trackers, device, config, dtype
        self.every, self.packs_per_step, self.packs_per_epoch = every, packs_per_step, packs_per_epoch
        self.first, self.ranks, self.also, self.perplexity = first, ranks, also, perplexity
        self.frozen_base, self.adapters, self.vision_training = frozen_base, adapters, vision_training
        self.more_of = (further, live_reference)
        self.extras: dict[str, float] = {}  # what the latest record has besides loss and rates
        self._speeds: deque[float] = deque(maxlen=RECORDS)
        self._all = [0, 0, 0, 0]  # tokens, those with a label, sums of squared document lengths, packs
        self._wait = DataWait()
        self._reset(time.perf_counter())

    def _reset(self, since: float) -> None:
        self._losses: list[float] = []
        self._extras: dict[str, list[float]] = {}
        self._tokens = self._trained = self._squares = self._steps = 0
        self._shown, self._waited = PictureCounts(), 0.0
        self._since = since

    def on_start(self, trainer: TrainingLoop) -> None:
        self._reset(time.perf_counter())
        self.trackers.start(total_steps=trainer.max_steps, start_step=trainer.state.step)

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def phase(self, name: str) -> None:
        self._wait.came(time.perf_counter())
        if name == "data":
            self._wait.request(time.perf_counter())
        elif name == "restore":
            self._wait.forget()

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self._steps += 1
        self._waited += self._wait.finished(result.finished_at)
        self._shown = PictureCounts(*map(sum, zip(self._shown, result.shown)))
        self._tokens += result.tokens
        self._trained += result.trained_tokens
        self._squares += result.sum_squares
        counted = (result.tokens, result.trained_tokens, result.sum_squares, self.packs_per_step)
        self._all = [sum(pair) for pair in zip(self._all, counted)]
        if result.applied:
            self._losses.append(result.loss)
            for name, value in result.extras.items():
                self._extras.setdefault(name, []).append(value)
        else:
            self.trackers.event(result.step, "skipped", f"loss {result.loss}, gradient norm {result.grad_norm}")
        due = (
            (self.every and result.step % self.every == 0)
            or (self.first and result.step == 1)
            or result.step == trainer.max_steps
        )
        if due and self._losses:
            self.trackers.log(result.step, self._record(trainer, result), "train")
            self._reset(result.finished_at)
        self.trackers.advance(result.step)

    def usual(self) -> StepStatistics | None:
        """None before the first record."""
        tokens, trained, squares, packs = self._all
        if not self._speeds or not tokens:
            return None
        later = list(self._speeds)[1:] or self._speeds  # the first has compilations and recordings
        return StepStatistics(statistics.median(later), tokens / packs, squares / tokens, trained / tokens)

    def _flops(self) -> float:
        """Since the latest record, of all ranks."""
        vision_tokens, adapters, vision_training = self._shown.vision_tokens, float(self.adapters), self.vision_training
        if vision_training is not None and vision_tokens:
            adapters += (vision_training.adapters - adapters) * vision_tokens / self._tokens
        token_counts = TokenCounts(
            self._tokens, self._trained, self._squares, vision_tokens if vision_training is not None else 0
        )
        own = step_flops(self.config, token_counts, self.frozen_base, adapters, *self.more_of)
        return own if vision_training is None else own + vision_training.flops(self.config, self._shown)

    def _record(self, trainer: TrainingLoop, result: StepResult) -> dict[str, float | None]:
        seconds = max(1e-9, result.finished_at - self._since)
        self._speeds.append(self._tokens / seconds)
        loss = sum(self._losses) / len(self._losses)
        flops = self._flops()
        self.extras = {name: sum(values) / len(values) for name, values in self._extras.items()}
        return {
            "loss": loss,
            **({"ppl": math.exp(min(loss, 700.0))} if self.perplexity else {}),
            "learning_rate": result.learning_rate,
            "grad_norm": result.grad_norm,
            **self.extras,
            **(self.also() if self.also is not None else {}),
            "tokens_per_second": self._speeds[-1],
            "trained_tokens_per_second": self._trained / seconds,
            "mfu": mfu(flops, seconds, self.device.peak_flops.get(self.dtype), self.ranks),
            "data_wait": min(1.0, self._waited / seconds),
            **self.device.memory(),
            "interval_runtime": seconds,
            "interval_samples_per_second": self._steps * self.packs_per_step / seconds,
            "interval_steps_per_second": self._steps / seconds,
            "progress_or_epoch": trainer.state.packs / max(1, self.packs_per_epoch),
        }
