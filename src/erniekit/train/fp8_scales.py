"""The static scales of FP8 training: from the first numbers to a moving average, the same in every layout.

Made by recipes/fp8_training.py; a hook that moves the scales behind each update. A step's activations are rounded with
the scales the step before left: so all its micro-batches on all ranks use the same ones, no layer waits for other
ranks, and a layer that is computed again rounds as it did. All scales of a step take one reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from erniekit.checkpoint import fp8_file
from erniekit.checkpoint.fp8_file import LayerScale, SavedScales
from erniekit.models.layers.rounding import StaticRounding
from erniekit.parallel import comm
from erniekit.parallel.gradients import local
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding import Sharding
from erniekit.train.hooks import Hook, TrainingLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from erniekit.train.step import Launched

ROWS = 4096  # of a weight that are rotated at a time


@dataclass(frozen=True)
class Moving:
    """online_steps: for so many steps scales are those of the last step's own numbers; from then on each step moves
    the mean of them by `rate`."""

    online_steps: int = 200
    rate: float = 0.01
    highest: float = 448.0  # what the largest number becomes


class StaticScales(Hook):
    def __init__(
        self, layers: Mapping[str, Any], sharding: Sharding, world: World, moving: Moving, dtype: torch.dtype
    ) -> None:
        """layers: this rank's HoldsWeight with static rounding, by name. dtype: what weights are multiplied in. All
        ranks make one together."""
        self.layers, self.sharding, self.world, self.moving, self.dtype = dict(layers), sharding, world, moving, dtype
        self.group = world.joined("dp", "fsdp", "cp", "tp")
        self.steps = 0  # that moved the scales
        self._experts = {n: sharding.expert_count(f"{n}.weight") if self._of_experts(n) else 1 for n in self.layers}
        device = next((layer.rounding.most.device for layer in self.layers.values()), torch.device("cpu"))
        self._mean = torch.zeros(len(self.layers), device=device)  # of the online steps' scales
        self._over = torch.zeros_like(self._mean)  # the largest number over what its scale holds, since the last record
        self._trained = any(layer.weight.requires_grad for layer in self.layers.values())

    def _of_experts(self, name: str) -> bool:
        return self.sharding.is_expert(f"{name}.weight")

    # --- the moments ---

    @torch.no_grad()
    def measure(self, run: Callable[[], object]) -> None:
        """First scales, of the numbers that `run` sends through the model; its products are not rounded."""
        with self._measuring():
            run()
        most, weights = self._reduced(with_weights=True)
        self._set_weights(weights)
        self._mean = StaticRounding.scale_of(most, self.moving.highest)
        self._set_inputs(self._mean)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        for layer in self.layers.values():
            layer.rounding.most.zero_()
            layer.rounding.measuring = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.rounding.measuring = False

    def on_start(self, trainer: TrainingLoop) -> None:
        """What checks before the run sent through the model does not count."""
        for layer in self.layers.values():
            layer.rounding.most.zero_()

    def launched(self, trainer: TrainingLoop, step: Launched) -> None:
        self.after_update(step.good)

    @torch.no_grad()
    def after_update(self, good: torch.Tensor | None = None) -> None:
        """good: 0 where the step's numbers were none, and nothing moves."""
        most, weights = self._reduced(self._trained)
        if self._trained:
            self._set_weights(weights)
        new = StaticRounding.scale_of(most, self.moving.highest)
        valid = most.isfinite() & (most > 0)
        if good is not None:
            valid &= good.to(most.device) > 0
        now = self._inputs()
        new = torch.where(valid, new, now)
        self._over = torch.maximum(self._over, torch.where(valid, new / now, 0.0))
        self.steps += 1
        if self.steps <= self.moving.online_steps:
            self._mean = self._mean + (new - self._mean) / (self.steps + 1)  # the first numbers count as one step
            used = new
        else:
            used = self._mean = torch.where(valid, self._mean + self.moving.rate * (new - self._mean), self._mean)
        self._set_inputs(used)

    def metrics(self) -> dict[str, float]:
        """Since the last call, of the layers on this rank's stage (enable_fp8_quantize_analysis)."""
        over, self._over = self._over.tolist(), torch.zeros_like(self._mean)
        return {"fp8_clipped": float(sum(each > 1.0 for each in over)), "fp8_worst": max(over, default=0.0)}

    # --- the numbers ---

    def _reduced(self, with_weights: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest number of each layer's rows since the last call, and of each matrix of its weight."""
        found = [layer.rounding.most for layer in self.layers.values()]
        count = len(found)
        if with_weights:
            found = found + [self._largest(name).to(self._mean.device) for name in self.layers]
        both = torch.cat(found) if found else self._mean.new_zeros(0)
        if self.group is not None:
            comm.all_reduce(both, self.group, "max")
        for layer in self.layers.values():
            layer.rounding.most.zero_()
        return both[:count], both[count:]

    def _largest(self, name: str) -> torch.Tensor:
        """fp32, one for each expert of the whole model, or [1]; zero where this rank has nothing of it."""
        layer, weight = self.layers[name], local(self.layers[name].weight)
        rows_of_one = self.sharding.shape(f"{name}.weight")[0] // self._experts[name]
        out = torch.zeros(self._experts[name], device=weight.device)
        for box in self.sharding.boxes(f"{name}.weight", self.world.rank):
            start = box.global_slices[0].start
            for part in weight[box.local_slices].split(ROWS):
                each = layer.rounding.largest_of_rows(part.to(self.dtype))
                of = torch.arange(start, start + part.shape[0], device=weight.device) // rows_of_one
                out.scatter_reduce_(0, of, each, "amax")
                start += part.shape[0]
        return out

    def _set_weights(self, most: torch.Tensor) -> None:
        for (name, layer), whole in zip(self.layers.items(), most.split(list(self._experts.values()))):
            first, last = self.sharding.experts_held(f"{name}.weight", self.world.rank)
            layer.rounding.weight_scale.copy_(StaticRounding.scale_of(whole[first:last], self.moving.highest))

    def _inputs(self) -> torch.Tensor:
        scales = [layer.rounding.input_scale for layer in self.layers.values()]
        return torch.cat(scales) if scales else self._mean

    def _set_inputs(self, scales: torch.Tensor) -> None:
        for layer, scale in zip(self.layers.values(), scales.split(1)):
            layer.rounding.input_scale.copy_(scale)

    # --- checkpoints ---

    def saved(self) -> SavedScales:
        """Of all layers of the model; all ranks must call it."""
        inputs, means = self._inputs().tolist(), self._mean.tolist()
        mine = {
            name: LayerScale(scale, mean, layer.rounding.form.block)
            for (name, layer), scale, mean in zip(self.layers.items(), inputs, means)
        }
        whole: dict[str, LayerScale] = {}
        for part in self.world.gather(mine):
            whole |= part
        return SavedScales(self.steps, self.moving.highest, whole)

    @torch.no_grad()
    def restore(self, folder: Path, keep_inputs: bool = False) -> None:
        """Behind the weights, whose scales are taken from them. keep_inputs: those of activations stay new ones."""
        _, weights = self._reduced(with_weights=True)
        self._set_weights(weights)
        if keep_inputs:
            return
        saved = fp8_file.load(folder)
        if saved is None or any(name not in saved.layers for name in self.layers):
            raise fp8_file.missing(folder)
        self.steps, layers = saved.steps, [saved.layers[name] for name in self.layers]
        self._set_inputs(torch.tensor([layer.input_scale for layer in layers], device=self._mean.device))
        self._mean = torch.tensor([layer.mean for layer in layers], device=self._mean.device)
