"""The expert layer of a vision-language model: text tokens and vision tokens have experts and a router of their own, of
different widths, and share the shared experts.

Each bank is called with all tokens, with the choices of the other modality's marked as of no expert. Its experts have
rows for its own tokens only: how many those are is counted where the batch is made, in host memory, so that nothing
waits for the device. A batch without pictures calls the vision bank with no token, yet calls it: collectives and
gradients are the same on every rank, whatever it reads.
Held by models/layers/decoder.py. B batch, L length, H hidden, T = B * L tokens, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.kernels.autograd_function import Function
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.moe import MoE

OF_VISION = "_vision"  # behind the names of what the vision bank records


def lengths_of(
    modality: torch.Tensor, vision_tokens: int | None, step: int = 1
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tensors as long as tokens are text, and as long as they are not: lengths that differ from batch to batch, as
    compiled layers take them. vision_tokens: how many are not; None: not known. step: lengths are rounded up to
    multiples of it, so that few differ; the rows beyond are of no expert."""
    if vision_tokens is None:
        return None
    tokens = modality.numel()
    text, vision = (min(tokens, -(-count // step) * step) for count in (tokens - vision_tokens, vision_tokens))
    made = modality.new_empty(text), modality.new_empty(vision)
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the call would import the compiler
        for one in made:
            torch._dynamo.maybe_mark_dynamic(one, 0)
    return made


class Correction(nn.Module):
    """The routers' biases, one row a modality, as files keep them. A module, so that what gathers it has a place."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, experts), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.bias


class Bank(MoE):
    """The router and experts of one modality."""

    def __init__(self, config: DecoderConfig, shape: MoEShape, layer: int) -> None:
        super().__init__(replace(config, moe=shape), layer)

    def answer(
        self, x_BLH: torch.Tensor, own_BL: torch.Tensor | None, bias: torch.Tensor | None, ctx: Any,
        length: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[B, L, H], zero where a token is not its own. own None: all are. length: as many as are, on all ranks that
        have a slice of these rows; None: not known."""
        x_TH = x_BLH.flatten(0, 1)
        routing = self.router(x_TH, bias)
        if own_BL is not None:
            own = own_BL.reshape(-1, 1)
            ids = torch.where(own, routing.ids, self.router.experts)
            routing = routing._replace(ids=ids, weights=routing.weights * own, own=length)
        y_TH = self.exchange(x_TH, routing, self.experts, self.router.experts)
        result: torch.Tensor = self.balance(y_TH.view_as(x_BLH), routing, self.router, ctx)
        return result


class ModalMoE(nn.Module):
    """An ExpertBlock of model_contract.py, with two banks."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.layer = layer
        self.text, self.vision = Bank(config, moe.of_text(), layer), Bank(config, moe.of_vision(), layer)
        self.correction = Correction(moe.experts) if moe.bias else None
        self.shared = MLP(config.hidden_size, moe.shared_width, config.mlp_bias) if moe.shared_width else None

    def banks(self) -> Iterator[Bank]:
        yield self.text
        yield self.vision

    def forward(self, x_BLH: torch.Tensor, ctx: Any) -> torch.Tensor:
        text, vision = (None, None) if self.correction is None else self.correction().unbind(0)
        modality = ctx.modality
        sheet: dict[str, Any] | None = None if ctx.record is None else {}
        if modality is None:
            y_BLH = self.text.answer(x_BLH, None, text, ctx)
            none = self.vision.answer(x_BLH[:, :0], None, vision, ctx._replace(real=None, record=sheet))
            y_BLH = _WithNothing.apply(y_BLH, none)
        else:
            is_vision = modality != 0
            real_text, real_vision = (own if ctx.real is None else own & ctx.real for own in (~is_vision, is_vision))
            here_text, here_vision = (self._here(own, x_BLH) for own in (~is_vision, is_vision))
            of_text, of_vision = (None, None) if ctx.lengths is None else ctx.lengths
            y_BLH = self.text.answer(x_BLH, here_text, text, ctx._replace(real=real_text), of_text)
            vision_ctx = ctx._replace(real=real_vision, record=sheet)
            y_BLH = y_BLH + self.vision.answer(x_BLH, here_vision, vision, vision_ctx, of_vision)
        if sheet is not None:
            _merge(ctx.record, sheet)
        return y_BLH if self.shared is None else y_BLH + self.shared(x_BLH)

    piece = (0, 1)  # which of how many slices of a row is here, under sequence parallelism

    def _here(self, own_BL: torch.Tensor, x_BLH: torch.Tensor) -> torch.Tensor:
        place, pieces = self.piece
        return own_BL if pieces == 1 else own_BL.chunk(pieces, dim=1)[place]


def _merge(record: dict[str, Any], of_vision: dict[str, Any]) -> None:
    """Loads side by side, [2, E], all else under its own name."""
    for name, value in of_vision.items():
        if name == "usage":
            record[name] = torch.stack((record[name], value))
        else:
            record[name + OF_VISION] = value


class _WithNothing(Function):
    """y as it is; what was computed of no token is part of the graph, and its gradient has no rows."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
        ctx.shape = none.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.new_zeros(ctx.shape)


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import ExpertBlock

    def _block(layer: ModalMoE) -> ExpertBlock:
        return layer
