"""Frozen packed weights in pieces over the ranks, under sharding stage 3. Called by apply.py.

The packed tensors of a layer lie end to end in one parameter next to its other weights, and fully_shard cuts it,
gathers it before use and frees it after, as it does with those. A rank's piece may begin inside a row or a scale:
nothing is computed from a piece. Experts that are dealt to other ranks have such a parameter of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from erniekit.kernels.stored import kind_named
from erniekit.kernels.stored.base import SLOTS
from erniekit.model_contract import packed_layers, spread, wrap
from erniekit.parallel.gradients import local
from erniekit.parallel.packed_bytes import NAME, PackedTensor, after, seen_in
from erniekit.parallel.sharding import Sharding

# What the parameter is made of. fully_shard takes floating-point ones only (torch 2.11), and on a card copies those of
# one 16-bit dtype through fp32 before it gathers them: two bytes that are a NaN would come out as another NaN.
# Parameters of several dtypes it copies byte by byte, and fp32 alone unchanged.
WORDS = torch.float32


def is_packed_bytes(name: str) -> bool:
    """A parameter of this file: not a weight of the model under a name of its own."""
    return name.rpartition(".")[2] == NAME


class PackedShards:
    """Of one part of a model, whose weights have no memory yet; `take` keeps this rank's piece of each as it is packed.

    apart: layers whose packed weights are elsewhere. compiled: whether layers are.
    """

    def __init__(
        self,
        part: nn.Module,
        sharding: Sharding,
        rank: int,
        compute: torch.dtype,
        device: torch.device,
        apart: Collection[int],
        compiled: bool,
    ) -> None:
        self.sharding, self.rank = sharding, rank
        self._unit_of: dict[nn.Module, _Unit] = {}
        for owner, holders in _owners(part, sharding, apart):
            unit = _Unit(owner, holders, compute, device)
            self._unit_of |= dict.fromkeys(holders, unit)
            # Experts are gathered inside their layer: the compiler leaves them, as it leaves the gathering.
            inside = compiled and owner not in [layer for _, layer in spread(part).held_layers()]
            wrap(owner, partial(unit.around, inside=inside))

    @torch.no_grad()
    def take(self, holder: nn.Module, weight: str) -> None:
        """After the weight of that name was packed."""
        if holder in self._unit_of:
            unit = self._unit_of[holder]
            unit.keep(holder, self.sharding.packed_piece(weight, self.rank, unit.count))


def _owners(
    part: nn.Module, sharding: Sharding, apart: Collection[int]
) -> Iterator[tuple[nn.Module, dict[nn.Module, str]]]:
    """Modules that fully_shard gathers as one, and the holders of packed weights in them."""
    names = {module: name for name, module in part.named_modules()}
    for number, layer in spread(part).held_layers():
        if number in apart:
            continue
        dealt = [bank.experts for bank in layer.mlp.banks()] if layer.sparse else []
        of_layer: dict[nn.Module, str] = {}
        for owner in (*(dealt if sharding.layout.experts_over_data else ()), layer):
            inside: dict[nn.Module, str] = {m: names[m] for m in packed_layers(owner).values()}
            mine = {m: name for m, name in inside.items() if m not in of_layer}
            of_layer |= mine
            if mine and sharding.packed_ranks(weight_of(next(iter(mine.values())))) > 1:
                yield owner, mine


def weight_of(holder: str) -> str:
    """The name of a weight from that of the module that holds it, an adapter around it or not."""
    return f"{holder}.".replace(".base.", ".") + "weight"


class _Unit:
    """The packed tensors of one module that is gathered as a whole."""

    def __init__(
        self, owner: nn.Module, holders: Collection[nn.Module], compute: torch.dtype, device: torch.device
    ) -> None:
        self.owner: Any = owner
        self.tensors: list[PackedTensor] = []
        self._shown: torch.Tensor | None = None
        size = 0
        for holder in holders:
            for slot, like in _packed_like(holder, compute, device).items():
                self.tensors.append(PackedTensor(holder, f"packed_{slot}", size, like))
                size = after(size, like)
        self.count = -(-size // WORDS.itemsize)
        data = torch.empty(self.count, dtype=WORDS, device="meta")
        owner.register_parameter(NAME, nn.Parameter(data, requires_grad=False))

    def around(self, forward: Callable[..., Any], inside: bool) -> Callable[..., Any]:
        """forward: the module's own. inside: within a layer that is compiled."""
        self.own_forward = forward
        return torch._dynamo.disable(self.run) if inside else self.run

    def keep(self, holder: nn.Module, piece: tuple[int, int]) -> None:
        """Of the holder's tensors the bytes in `piece`, which counts in words of the parameter."""
        here = local(getattr(self.owner, NAME)).view(-1).view(torch.uint8)
        first, last = piece[0] * WORDS.itemsize, piece[1] * WORDS.itemsize
        for tensor in [t for t in self.tensors if t.holder is holder]:
            value = getattr(holder, tensor.name)
            if value is None:  # a related kind does without it
                self.tensors.remove(tensor)
                continue
            assert (value.shape, value.dtype) == (tensor.like.shape, tensor.like.dtype), "one row says how all are kept"
            a, b = max(tensor.start, first), min(tensor.stop, last)
            if a < b:
                given = value.contiguous().view(-1).view(torch.uint8)
                here[a - first : b - first].copy_(given[a - tensor.start : b - tensor.start])
            tensor.show(tensor.like)

    def run(self, *args: Any) -> Any:
        """The module's forward: fully_shard has gathered the bytes. The same memory each time, which it frees and
        fills again; what is computed again in backward finds it filled as well."""
        gathered = getattr(self.owner, NAME)
        if gathered is not self._shown:
            whole = gathered.data.view(torch.uint8)
            for tensor in self.tensors:
                tensor.show(seen_in(whole, tensor))
            self._shown = gathered
        return self.own_forward(*args)


def _packed_like(holder: Any, compute: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """What the holder's weight will be packed into, without memory: rows are packed each by itself, so one is
    enough."""
    rows, width = holder.held_shape
    one = kind_named(holder.kind).pack(torch.zeros(1, width, dtype=compute, device=device))
    found = {slot: getattr(one, slot) for slot in SLOTS}
    return {
        slot: torch.empty(rows, *t.shape[1:], dtype=t.dtype, device="meta")
        for slot, t in found.items()
        if t is not None
    }
