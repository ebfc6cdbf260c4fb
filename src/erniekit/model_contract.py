"""What parallel/, lora/, losses/, recipes/ and serve/ may use of a model, its blocks, expert layers and collaborators.

A collaborator is a module without weights in a named slot (`embedding`, `output`, a block's `attn.inner`, an expert
layer's `exchange` and `balance`): spreading a model over ranks puts another one there, and replaces no method. A model
of another kind that keeps to this file is spread, adapted, trained and served by the same code; docs/adding-a-model.md
shows one. B batch, L length, H hidden, V vocab, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class TokenEmbedding(Protocol):
    """Slot `embedding` of a model."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Ids [B, L] and the weight (or this rank's rows of it) -> [B, L, H]."""


class OutputHead(Protocol):
    """Slot `output` of a model: see models/layers/head.py for the arguments."""

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def loss(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *more: Any) -> torch.Tensor: ...

    def token_losses(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *more: Any
    ) -> torch.Tensor: ...


class DecoderBlock(Protocol):
    """A decoder layer."""

    here: bool  # False: it is on another pipeline stage, and this one passes its input on
    sparse: bool  # `mlp` is an ExpertBlock
    attn: Any  # with `inner`, the attention without weights
    mlp: Any

    def attend(self, x: torch.Tensor, ctx: Any) -> torch.Tensor: ...

    def __call__(self, x: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class ExpertBank(Protocol):
    """A router and its experts."""

    router: Any
    experts: Any
    exchange: Any  # (x [T, H], routing, experts, count) -> [T, H]: how tokens reach their experts
    balance: Any  # (y, routing, router, ctx) -> y, with router losses attached


class ExpertBlock(Protocol):
    """`mlp` of a sparse layer. Where it has several banks, `piece` is the slice of a row it works on, and
    `correction` holds the routers' biases."""

    shared: Any  # the shared experts, or None

    def banks(self) -> Iterator[Any]:
        """Every ExpertBank: of text only, or of text and vision."""


class SpreadModel(Protocol):
    config: Any
    embedding: Any
    output: Any
    layers: Any  # one DecoderBlock for each layer of the model
    mtp: Any  # layers that predict further tokens, each with a `block`; empty where there are none
    mtp_weight: float  # of their losses; 0: they rest
    row_slice: tuple[int, int]  # which slice of every row is here, of how many
    first: bool  # has the embedding; a pipeline stage may have neither
    last: bool  # has the head
    records: list[dict[Any, Any]] | None  # what blocks record of each micro-batch, where it is read

    def held_layers(self) -> Iterator[tuple[int, Any]]:
        """(number, DecoderBlock) of the layers on this stage."""

    def blocks(self) -> Iterator[Any]:
        """Every DecoderBlock on this stage, those inside `mtp` too."""

    def front(self) -> Iterator[Any]:
        """Blocks in front of the layers, on the first stage: a vision tower's."""

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor: ...

    def head_weight(self) -> torch.Tensor: ...

    def head_bias_or_none(self) -> torch.Tensor | None: ...

    def run_layers(self, x: torch.Tensor, ctx: Any) -> torch.Tensor: ...


def bare(module: nn.Module) -> Any:
    """A linear without the adapter around it."""
    return getattr(module, "base", module)


def pairs_of(module: nn.Module) -> Mapping[str, Any]:
    """The adapters on a linear, by name."""
    found: Mapping[str, Any] = getattr(module, "lora", {})
    return found
