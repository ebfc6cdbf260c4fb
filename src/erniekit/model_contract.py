"""What parallel/, lora/, losses/, recipes/ and serve/ may use of a model, its blocks, expert layers and collaborators.

A collaborator is a module without weights in a named slot (`embedding`, `output`, a block's `attn.inner`, an expert
layer's `exchange` and `balance`, a tower's `encode` and `insert`): spreading a model over ranks puts another one there.
What surrounds a computation as it is (compiling or recording it, computing it again in backward, fetching weights
before it) is put around a method by `wrap`, and by nothing else. A model of another kind that keeps to this file is
spread, adapted, trained and served by the same code; docs/adding-a-model.md shows one. mypy checks both sides: `spread`
types what is asked, models/layers/ what is there. B batch, L length, H hidden, V vocab, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn

PICTURES = "vision"  # the tower of pictures and video frames


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


class WeightHolder(Protocol):
    """A linear, or the experts' of one projection: holds a weight [rows, in], plain or packed."""

    weight: nn.Parameter | None  # None: packed
    kind: str  # of stored weights
    packed_shape: tuple[int, ...] | None  # [rows, in] of what is or will be packed; None: the weight is plain

    @property
    def held_shape(self) -> tuple[int, int]: ...

    @property
    def is_packed(self) -> bool:
        """Its packed tensors are there: buffers `packed_` and a slot's name."""

    def cut_to(self, shape: tuple[int, ...]) -> None:
        """A rank's share of the weight, before it has memory."""

    def pack(self, plain: torch.Tensor, agree: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None: ...


class BiasAdder(Protocol):
    """A linear whose bias others may add."""

    adds_bias: bool  # False: once the outputs of several ranks have been summed


class InnerPart(Protocol):
    """`attn.inner`: queries, keys and values to outputs, without weights."""

    def takes(self, dtype: torch.dtype, ctx: Any, /) -> bool:
        """Whether kernels for a card do all of it, from the fused projection on: launches only."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any, /) -> torch.Tensor: ...


class DecoderBlock(Protocol):
    """A decoder layer."""

    here: bool  # False: it is on another pipeline stage, and this one passes its input on
    sparse: bool  # `mlp` is an ExpertBlock
    attn: Any  # with `inner`, an InnerPart
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

    def towers(self) -> Mapping[str, Tower]:
        """By name, in the order in which they put in their features; empty: a text model. The same on every stage."""

    def front(self) -> Iterator[Any]:
        """Blocks in front of the layers, on the first stage: the towers'."""

    def context(self, positions: torch.Tensor, *, more: Any = None) -> Any:
        """What all layers share for one batch: the `ctx` of blocks."""

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor: ...

    def run_layers(self, x: torch.Tensor, ctx: Any, /) -> torch.Tensor:
        """[B, L, H] through all layers."""

    def head_weight(self) -> torch.Tensor: ...

    def head_bias_or_none(self) -> torch.Tensor | None: ...


class Tower(Protocol):
    """An encoder in front of the layers, on the first stage: makes features [F, H] of items that are no tokens, such as
    pictures, which take the places of some tokens' embeddings.

    inputs: what a batch has for it, under its name (data/types.py): a NamedTuple of one or more items, with `places`
    (int64 [F]: which of the flattened [B * L] tokens take the features, in their order).
    """

    name: str
    prefixes: tuple[str, ...]  # of its weights' names: each a module of the model, and a dot
    adapts: tuple[str, ...]  # those of them with projections for LoRA
    # How its weights shard (parallel/plan.py). All dealt(): items are dealt out to the tensor-parallel ranks; else each
    # of those encodes all items.
    plan: Mapping[str, Any]
    encode: Any  # (tower, inputs) -> features: decides which rank encodes which item
    insert: Any  # (x [B, L, H], features, places) -> x with the features in it
    recordable: Any  # what parallel/recorded_tower.py can replay as CUDA graphs; None: nothing
    run: Callable[..., torch.Tensor] | None  # in place of `recordable`
    always_encodes: bool  # also at batches without inputs for it, on no item

    def blocks(self) -> Iterator[nn.Module]:
        """Modules that are each gathered, and computed again, by themselves."""

    def encode_here(self, inputs: Any, /) -> torch.Tensor:
        """Features of all items, on this rank."""

    def counts(self, inputs: Any, /) -> list[int]:
        """How many features each item becomes; without waiting for the device, as `costs`."""

    def costs(self, inputs: Any, /) -> list[float]:
        """Of encoding each item, in any unit."""

    def select(self, inputs: Any, items: Sequence[int], /) -> Any:
        """inputs with these items alone, ascending; `places` as they were."""

    def put_into(self, x: torch.Tensor, more: Any, /) -> torch.Tensor:
        """[B, L, H] with the features of a batch in their places; the model calls it for every batch."""


class PictureTower(Tower, Protocol):
    """The tower of a vision-language model. What is particular to pictures (recipes/vision_features.py, serve/) asks
    for it; parallel/ does not."""

    tower: Any
    resampler: Any
    kept: str | None  # of batches that hold features in the place of pixels: which; None: all hold pixels

    def features_of(self, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Patches of the pictures of these grids -> their features, here."""


def spread(model: nn.Module) -> SpreadModel:
    """A model of models/, as what this file says of it."""
    return cast("SpreadModel", model)


def picture_tower(model: nn.Module) -> PictureTower | None:
    """Of a model that takes pictures."""
    return cast("PictureTower | None", spread(model).towers().get(PICTURES))


def front_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Of the names of all weights in front of the layers."""
    return tuple(prefix for tower in spread(model).towers().values() for prefix in tower.prefixes)


def wrap(module: nn.Module, around: Callable[[Any], Callable[..., Any]], method: str = "forward") -> None:
    """A method of one module becomes what `around` makes of it. The wrapper computes what the method computes."""
    setattr(module, method, around(getattr(module, method)))


# What modules of any class may have; a module without it has the default.


def bare(module: nn.Module) -> Any:
    """A linear without the adapter around it."""
    return getattr(module, "base", module)


def pairs_of(module: nn.Module) -> Mapping[str, Any]:
    """The adapters on a linear, by name."""
    found: Mapping[str, Any] = getattr(module, "lora", {})
    return found


def parts_of(module: nn.Module) -> tuple[tuple[str, int], ...] | None:
    """`parts`: (public name, rows) of the projections inside a fused weight, in row order; None: it is one."""
    found = getattr(module, "parts", None)
    return found if isinstance(found, tuple) else None


def weight_holder(module: nn.Module) -> WeightHolder | None:
    return cast("WeightHolder", module) if hasattr(module, "packed_shape") else None


def bias_adder(linear: nn.Module) -> BiasAdder:
    assert hasattr(linear, "adds_bias"), "a linear that is cut by columns leaves its bias to who sums"
    return cast("BiasAdder", linear)


def packed_layers(model: nn.Module) -> dict[str, Any]:
    """The WeightHolders whose weight is kept as another kind than plain, by name."""
    found = ((name, weight_holder(module)) for name, module in model.named_modules())
    return {name: holder for name, holder in found if holder is not None and holder.packed_shape is not None}


def waits_for_host(module: nn.Module) -> bool:
    """`waits_for_host`: its forward reads numbers of the device, so that no compiled layer can hold it."""
    return bool(getattr(module, "waits_for_host", False))


def row_functions(module: nn.Module) -> tuple[str, ...]:
    """`by_row`: names of its functions that go element by element over as many rows as there are this time."""
    found: tuple[str, ...] = getattr(module, "by_row", ())
    return found


def keep_kernels(module: nn.Module) -> None:
    """`keeps_kernel`: of modules inside, whether a compiled layer calls their own kernel. Else the compiler makes one,
    whose sums have an order of their own in each program."""
    each: Any
    for each in module.modules():
        if hasattr(each, "keeps_kernel"):
            each.keeps_kernel = True


def choose_kernels(model: nn.Module, device: torch.device) -> None:
    """`choose_kernels`: what a module decides once adapters are in and weights are cut."""
    for module in list(model.modules()):
        choose = getattr(module, "choose_kernels", None)
        if choose is not None:
            choose(device)
