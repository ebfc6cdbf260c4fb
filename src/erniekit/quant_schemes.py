"""The number formats a finished model can be quantised to, by name: which exist, without importing torch.

Read by config/ (the choices of `quant`), kernels/compressed.py (the arithmetic), checkpoint/ (reading such files) and
quantize/ (writing them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CHANNEL = -1  # the group size that means: one scale for a whole row


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored, in compressed-tensors' terms; `nf4` is bitsandbytes'."""

    bits: int
    number: Literal["int", "float", "nf4"]
    strategy: Literal["group", "channel", "tensor"]  # which numbers share a scale: some of a row, a row, a tensor
    group: int = 0  # of strategy group: numbers of a row that share a scale
    inputs: Literal["", "token", "tensor"] = ""  # how an engine quantises activations: not, each token's, by one scale
    format: str = "pack-quantized"

    @property
    def is_mxfp4(self) -> bool:
        return self.number == "float" and self.bits == 4

    @property
    def static_inputs(self) -> bool:
        """Whether the activations' scale is stored: it takes rows to find it."""
        return self.inputs == "tensor"

    def with_group(self, size: int) -> Scheme:
        if size == CHANNEL:
            return replace(self, strategy="channel", group=0)
        return replace(self, strategy="group", group=size)


@dataclass(frozen=True)
class QuantRecipe:
    """What `quant: NAME` does to a model: routed experts by one scheme, all other linears by another."""

    experts: Scheme
    rest: Scheme
    about: str

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return (self.experts,) if self.experts == self.rest else (self.experts, self.rest)

    @property
    def takes_groups(self) -> bool:
        return any(s.number == "int" and not s.inputs for s in self.schemes)

    @property
    def needs_rows(self) -> bool:
        return any(scheme.static_inputs for scheme in self.schemes)


_W4 = Scheme(4, "int", "group", 128)
_W8 = Scheme(8, "int", "channel")
_W8A8 = Scheme(8, "int", "channel", inputs="token", format="int-quantized")
_FP8_STATIC = Scheme(8, "float", "tensor", inputs="tensor", format="float-quantized")
_FP8_DYNAMIC = Scheme(8, "float", "channel", inputs="token", format="float-quantized")
_MXFP4 = Scheme(4, "float", "group", 32, format="mxfp4-pack-quantized")
_NF4 = Scheme(4, "nf4", "group", 64, format="bitsandbytes")

QUANT_RECIPES = {
    "w4a16": QuantRecipe(_W4, _W4, "int4 weights, a scale for each group"),
    "w8a16": QuantRecipe(_W8, _W8, "int8 weights, a scale for each row"),
    "w4w8a16": QuantRecipe(_W4, _W8, "int4 experts, a scale for each group; int8 elsewhere"),
    "w8a8": QuantRecipe(_W8A8, _W8A8, "int8 weights, and int8 activations scaled for each token"),
    "fp8_static": QuantRecipe(_FP8_STATIC, _FP8_STATIC, "fp8 weights and activations, all scales stored"),
    "fp8_dynamic": QuantRecipe(_FP8_DYNAMIC, _FP8_DYNAMIC, "fp8 weights, and fp8 activations scaled for each token"),
    "mxfp4": QuantRecipe(_MXFP4, _MXFP4, "4-bit floats, a power of two for each 32"),
    "nf4": QuantRecipe(_NF4, _NF4, "4-bit quantiles of bitsandbytes, a scale for each 64"),
}
