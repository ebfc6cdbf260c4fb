"""What parallel/, lora/, losses/, recipes/ and serve/ may use of a model, its blocks, expert layers and collaborators.

A collaborator is a module without weights in a named slot (`embedding`, `output`, a block's `attn.inner`, an expert
layer's `exchange` and `balance`, `look` and `places` of a model that takes pictures): spreading a model over ranks puts
another one there. What surrounds a computation as it is (compiling or recording it, computing it again in backward,
fetching weights before it) is put around a method by `wrap`, and by nothing else. A model of another kind that keeps to
this file is spread, adapted, trained and served by the same code; docs/adding-a-model.md shows one. mypy checks both
sides: `spread` types what is asked, models/layers/ what is there. B batch, L length, H hidden, V vocab, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn


class TokenEmbedding(Protocol):
    """Slot `embedding` of a model."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Ids [B, L] and the weight (or this rank's rows of it) -> [B, L, H]."""


class OutputHead(Protocol):
    """Slot `output` of a model: see models/layers/head.py for the arguments."""

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, /) -> torch.Tensor: ...

    def loss(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, ignore: int,
        chunk: int, count: int | None = None, scale: float | None = None, /,
    ) -> torch.Tensor: ...  # fmt: skip

    def token_losses(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, ignore: int,
        chunk: int, count: int | None = None, /,
    ) -> torch.Tensor: ...  # fmt: skip


class DecoderBlock(Protocol):
    """A decoder layer."""

    here: bool  # False: it is on another pipeline stage, and this one passes its input on
    sparse: bool  # `mlp` is an ExpertBlock
    attn: Any  # with `inner`, the attention without weights
    mlp: Any

    def attend(self, x: torch.Tensor, ctx: Any, /) -> Any:
        """The part that recompute_granularity: full_attn computes again; called by the layer itself."""
        ...

    def __call__(self, x: torch.Tensor, ctx: Any, /) -> torch.Tensor: ...


class ExpertBank(Protocol):
    """A router and its experts."""

    router: Any
    experts: Any
    exchange: Any  # (x [T, H], routing, experts, count) -> [T, H]: how tokens reach their experts
    balance: Any  # (y, routing, router, ctx) -> y, with router losses attached


class ExpertBlock(Protocol):
    """`mlp` of a sparse layer."""

    shared: Any  # the shared experts, or None
    correction: Any  # a module with the biases of several routers, where they are one weight; else None
    piece: tuple[int, int]  # which slice of every row it works on, of how many

    def banks(self) -> Iterator[Any]:
        """Every ExpertBank: of text only, or of text and vision."""


class SpreadModel(Protocol):
    config: Any
    training: bool
    embedding: TokenEmbedding
    output: OutputHead
    norm: Any  # in front of the head
    layers: Any  # one DecoderBlock for each layer of the model
    mtp: Any  # layers that predict further tokens, each with a `block`; empty where there are none
    mtp_weight: float  # of their losses; 0: they rest
    row_slice: tuple[int, int]  # which slice of every row is here, of how many
    length_step: int  # numbers of text and of vision tokens are rounded up to multiples of it
    first: bool  # has the embedding; a pipeline stage may have neither
    last: bool  # has the head
    records: list[dict[Any, Any]] | None  # what blocks record of each micro-batch, where it is read

    def held_layers(self) -> Iterator[tuple[int, Any]]:
        """(number, DecoderBlock) of the layers on this stage."""

    def blocks(self) -> Iterator[Any]:
        """Every DecoderBlock on this stage, those inside `mtp` too."""

    def front(self) -> Iterator[Any]:
        """Blocks in front of the layers, on the first stage: a vision tower's."""

    def context(self, positions: torch.Tensor, *, more: Any = None) -> Any:
        """What all layers share for one batch: the `ctx` of blocks."""

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor: ...

    def run_layers(self, x: torch.Tensor, ctx: Any, /) -> torch.Tensor:
        """[B, L, H] through all layers."""

    def head_weight(self) -> torch.Tensor: ...

    def head_bias_or_none(self) -> torch.Tensor | None: ...


class SeeingModel(SpreadModel, Protocol):
    """One that takes pictures."""

    tower: Any
    look: Any  # (model, pictures) -> features: decides which rank runs the tower on which picture
    places: Any  # (x [B, L, H], features, places) -> x with the features in it
    run_tower: Callable[..., torch.Tensor] | None  # in place of the tower
    always_looks: bool  # also at batches without pictures, on no rows


def spread(model: nn.Module) -> SpreadModel:
    """A model of models/, as what this file says of it."""
    return cast("SpreadModel", model)


def seeing(model: nn.Module) -> SeeingModel | None:
    """The model, if it takes pictures."""
    return cast("SeeingModel", model) if spread(model).config.vision is not None else None


def wrap(module: nn.Module, around: Callable[[Any], Callable[..., Any]], method: str = "forward") -> None:
    """A method of one module becomes what `around` makes of it. The wrapper computes what the method computes."""
    setattr(module, method, around(getattr(module, method)))


def bare(module: nn.Module) -> Any:
    """A linear without the adapter around it."""
    return getattr(module, "base", module)


def pairs_of(module: nn.Module) -> Mapping[str, Any]:
    """The adapters on a linear, by name."""
    found: Mapping[str, Any] = getattr(module, "lora", {})
    return found
