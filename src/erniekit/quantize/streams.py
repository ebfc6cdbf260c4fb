"""The calibration rows on their way through a model, one decoder layer in memory at a time.

Used by run.py. Two sets of hidden states go from layer to layer, both in host memory: as the plain model computes them,
and as the quantised one does, whose layers are calibrated on what they will really meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from erniekit import heartbeat
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE, Batch
from erniekit.errors import CheckpointError
from erniekit.quant_schemes import QuantRecipe
from erniekit.quantize.layer_inputs import LayerInputs
from erniekit.quantize.rounded_inputs import rounding

POSITIONS = 512  # whose logits are in memory at a time


@dataclass(frozen=True)
class Quality:
    """Plain and quantised model on the same rows."""

    tokens: int
    perplexity: float
    quantised_perplexity: float
    kl: float  # of the quantised distribution from the plain one, mean over positions, in nats


class OneLayer:
    """The model on the meta device, of which one layer at a time has memory."""

    def __init__(self, folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.device = folder, device
        self.model = folder.spec.cast(folder.meta(), dtype).eval()
        self.entries = {entry.ours: entry for entry in folder.entries() if not entry.copy_of}

    def open(self, number: int) -> nn.Module:
        layer: nn.Module = self.model.layers[number].to_empty(device=self.device)  # type: ignore[index, union-attr, operator]
        self.fill(layer, {name: self.read(number, name) for name in layer.state_dict()})
        return layer

    def close(self, number: int) -> None:
        self.model.layers[number].to("meta")  # type: ignore[index, union-attr, operator]

    def read(self, number: int, name: str) -> torch.Tensor:
        """A tensor of a layer, by its name inside it, as stored."""
        return self.folder.read(self.entries[f"layers.{number}.{name}"])

    @torch.no_grad()
    def fill(self, module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        state = module.state_dict()
        for name, value in values.items():
            state[name].copy_(value)

    def top(self, *names: str) -> dict[str, torch.Tensor]:
        """Tensors outside of the layers, on the device."""
        return {name: self.folder.read(self.entries[name]).to(self.device) for name in names if name in self.entries}


class Streams:
    """rows: those that calibrate, then those that only measure."""

    def __init__(self, one: OneLayer, calibrating: Sequence[Batch], measuring: Sequence[Batch]) -> None:
        self.one, self.rows = one, [*calibrating, *measuring]
        self.calibrating, self.measured = len(calibrating), list(measuring) or list(calibrating)
        embed = one.top("embed.weight")["embed.weight"]
        dtype = next(one.model.parameters()).dtype
        self.plain = [F.embedding(row.input_ids.to(one.device), embed).to(dtype).cpu() for row in self.rows]
        self.quantised = [x.clone() for x in self.plain]

    @torch.no_grad()
    def watch(self, layer: nn.Module, hessians: bool) -> LayerInputs:
        """The plain layer on what the quantised ones below give it."""
        seen = LayerInputs(layer, hessians, self.one.device)
        with seen.watching(layer):
            for row, x in zip(self.rows[: self.calibrating], self.quantised):
                self._run(layer, row, x)
        if not all(torch.isfinite(stats.most) for stats in seen.linears.values()):
            raise CheckpointError(
                "activations of the calibration rows are not finite",
                where=str(self.one.folder.path),
                fix="compute_type=fp32, or look at the model: `erniekit eval` gives its loss",
            )
        return seen

    @torch.no_grad()
    def advance_plain(self, layer: nn.Module) -> None:
        for k, row in enumerate(self.rows):
            self.plain[k] = self._run(layer, row, self.plain[k])

    @torch.no_grad()
    def advance_quantised(self, layer: nn.Module, recipe: QuantRecipe, scales: Mapping[str, torch.Tensor]) -> None:
        with rounding(layer, recipe, scales):
            for k, row in enumerate(self.rows):
                self.quantised[k] = self._run(layer, row, self.quantised[k])

    def drift(self) -> float:
        """How far the quantised hidden states are from the plain ones, relative."""
        apart = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(self.plain, self.quantised))
        size = sum(float(a.float().square().sum()) for a in self.plain)
        return math.sqrt(apart / size) if size else 0.0

    def _run(self, layer: nn.Module, row: Batch, x: torch.Tensor) -> torch.Tensor:
        row = row.to(self.one.device)
        ctx = self.one.model.context(row.positions, row.documents(), row.max_doc, row.more())  # type: ignore[operator]
        out: torch.Tensor = layer(x.to(self.one.device), ctx)
        heartbeat.beat()
        return out.cpu()

    @torch.no_grad()
    def quality(self) -> Quality:
        """Of the last hidden states, on the rows that measure; where there are none, on those that calibrated."""
        head = self._head()
        first = len(self.rows) - len(self.measured)
        tokens = positions = 0
        loss = quantised_loss = kl = 0.0
        for k, row in enumerate(self.measured, start=first):
            labels = labels_of(row).to(self.one.device)
            length = labels.numel()
            for start in range(0, length, POSITIONS):
                part = slice(start, min(length, start + POSITIONS))
                p, q = (
                    F.log_softmax(head(states[k][:, part].to(self.one.device)).float(), -1).flatten(0, 1)
                    for states in (self.plain, self.quantised)
                )
                kl += float((p.exp() * (p - q)).sum())
                loss += float(F.nll_loss(p, labels[part], ignore_index=IGNORE, reduction="sum"))
                quantised_loss += float(F.nll_loss(q, labels[part], ignore_index=IGNORE, reduction="sum"))
                tokens += int((labels[part] != IGNORE).sum())
            positions += length
        return Quality(
            tokens, _exp(loss / max(1, tokens)), _exp(quantised_loss / max(1, tokens)), kl / max(1, positions)
        )

    def _head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        config, model = self.one.folder.config, self.one.model
        tensors = self.one.top("norm.weight", "head.weight", "head.bias", "head_bias", "embed.weight")
        norm = model.norm.to_empty(device=self.one.device)  # type: ignore[union-attr, operator]
        self.one.fill(norm, {"weight": tensors["norm.weight"]})
        weight = tensors["embed.weight" if config.tie_word_embeddings else "head.weight"]
        bias = tensors.get("head_bias", tensors.get("head.bias"))

        def logits(x: torch.Tensor) -> torch.Tensor:
            h = norm(x)
            return F.linear(h, weight.to(h.dtype), None if bias is None else bias.to(h.dtype))

        return logits


def labels_of(row: Batch) -> torch.Tensor:
    """Flat; where nothing of a row is trained, every next token counts."""
    labels = row.labels.flatten()
    if (labels != IGNORE).any():
        return labels
    return F.pad(row.input_ids.flatten()[1:], (0, 1), value=IGNORE)


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
