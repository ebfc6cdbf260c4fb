"""Quantising the weights of one decoder layer: linears whole, experts one after the other.

Called by run.py with the layer's inputs (layer_inputs.py). E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from erniekit.errors import CheckpointError
from erniekit.kernels.compressed import input_scale, scales_of
from erniekit.kernels.swiglu import reference as swiglu
from erniekit.models.names import Entry
from erniekit.quant_schemes import QuantRecipe, Scheme
from erniekit.quantize.file_parts import Parts, file_parts, nf4_parts
from erniekit.quantize.gptq import Rounded, round_weight
from erniekit.quantize.layer_inputs import LayerInputs

EXPERTS = "mlp.experts."
GATE_UP, DOWN = f"{EXPERTS}gate_up.weight", f"{EXPERTS}down.weight"


@dataclass(frozen=True)
class Method:
    compensate: bool  # GPTQ; else round to nearest
    expert_tokens: int  # each expert is calibrated on at least this many, where there are as many


@dataclass
class LayerResult:
    """`facts` goes into the report and into the layer's manifest: plain JSON."""

    parts: Parts = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=lambda: {"weights": [], "experts": []})


class LayerWeights:
    """read: a weight of the layer by its name inside it. advance: called with how many numbers were quantised."""

    def __init__(
        self,
        number: int,
        entries: Mapping[str, Entry],
        read: Callable[[str], torch.Tensor],
        recipe: QuantRecipe,
        method: Method,
        device: torch.device,
        advance: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.number, self.recipe, self.method, self.device, self.advance = number, recipe, method, device, advance
        self.entries = entries  # of the layer, by names inside it
        self.read = read

    def quantise(self, inputs: LayerInputs | None) -> LayerResult:
        out = LayerResult()
        for name in self.names():
            if name.startswith(EXPERTS):
                continue
            scheme, weight = self.recipe.rest, self._weight(name)
            stats = None if inputs is None else inputs.linears[name.removesuffix(".weight")]
            if scheme.number == "nf4":
                self._store_nf4(out, name, weight)
                continue
            scale = scales_of(weight, scheme)
            done = round_weight(weight, scale, scheme, None if stats is None else stats.hessian, self.method.compensate)
            most = None if stats is None else stats.most
            self._store(out, name, weight.dtype, done.weight, scale, scheme, most, [done])
        if GATE_UP in self.entries:
            self._experts(out, inputs)
        return out

    def names(self) -> Iterator[str]:
        return (name for name in self.entries if is_quantised(name))

    def _experts(self, out: LayerResult, inputs: LayerInputs | None) -> None:
        """One expert's tokens and Hessians at a time."""
        scheme = self.recipe.experts
        gate_up, down = self._weight(GATE_UP), self._weight(DOWN)
        if scheme.number == "nf4":
            self._store_nf4(out, GATE_UP, gate_up)
            self._store_nf4(out, DOWN, down)
            return
        count = len(self.entries[DOWN].theirs)
        scale_gate_up, scale_down = scales_of(gate_up, scheme, count), scales_of(down, scheme, count)
        rounded: list[tuple[Rounded, Rounded]] = []
        most = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        tensors = zip(*(t.chunk(count) for t in (gate_up, scale_gate_up, down, scale_down)), strict=True)
        for expert, (first, first_scale, second, second_scale) in enumerate(tensors):
            h_first = h_second = None
            if inputs is not None:
                x, inner = self._expert_inputs(out, inputs, expert, first)
                h_first, h_second = x.T @ x, inner.T @ inner
                most = torch.maximum(most[0], x.abs().max()), torch.maximum(most[1], inner.abs().max())
            rounded.append((
                round_weight(first, first_scale, scheme, h_first, self.method.compensate),
                round_weight(second, second_scale, scheme, h_second, self.method.compensate),
            ))  # fmt: skip
            self.advance(first.numel() + second.numel())
        for k, (name, scale) in enumerate(((GATE_UP, scale_gate_up), (DOWN, scale_down))):
            done = [pair[k] for pair in rounded]
            whole = torch.cat([one.weight for one in done])
            largest = most[k] if inputs is not None else None
            self._store(out, name, gate_up.dtype, whole, scale, scheme, largest, done, counted=True)

    def _expert_inputs(
        self, out: LayerResult, inputs: LayerInputs, expert: int, gate_up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = inputs.of_expert(expert, self.method.expert_tokens)
        if tokens.routed < self.method.expert_tokens:
            out.facts["experts"].append({"expert": expert, "routed": tokens.routed, "used": len(tokens.rows)})
        x = inputs.tokens[tokens.rows].to(self.device).float()
        return x, swiglu(x @ gate_up.float().T)

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.read(name).to(self.device)
        require_finite(self.entries[name], weight, f"layer {self.number}")
        return weight

    def _store(
        self, out: LayerResult, name: str, dtype: torch.dtype, weight: torch.Tensor, scale: torch.Tensor,
        scheme: Scheme, most: torch.Tensor | None, done: list[Rounded], counted: bool = False,
    ) -> None:  # fmt: skip
        inputs = None
        if scheme.static_inputs:
            assert most is not None
            inputs = input_scale(most, scheme, dtype).cpu()
        out.parts |= {k: v.cpu() for k, v in file_parts(self.entries[name], weight, scale, scheme, inputs).items()}
        for k, one in enumerate(done):
            shown = name if len(done) == 1 else name.replace("experts.", f"experts.{k}.")
            out.facts["weights"].append({
                "weight": f"layers.{self.number}.{shown}", "error": one.error, "nearest_error": one.nearest_error,
            })  # fmt: skip
        if not counted:
            self.advance(weight.numel())

    def _store_nf4(self, out: LayerResult, name: str, weight: torch.Tensor) -> None:
        out.parts |= {k: v.cpu() for k, v in nf4_parts(self.entries[name], weight).items()}
        out.facts["weights"].append({"weight": f"layers.{self.number}.{name}", "error": None, "nearest_error": None})
        self.advance(weight.numel())


def require_finite(entry: Entry, weight: torch.Tensor, where: str) -> None:
    if not torch.isfinite(weight).all():
        raise CheckpointError(
            f"{entry.theirs[0]} holds NaN or infinity",
            where=where,
            fix="the model is broken: take an earlier checkpoint",
        )


def is_quantised(name: str) -> bool:
    """Of a tensor inside a layer: attention's and the feed-forward's products; not norms, router or biases."""
    linear = ("attn.qkv.weight", "attn.out.weight", "gate_up.weight", "down.weight")
    return name.endswith(linear)
