"""The base of towers: encoders in front of the layers, whose features take the places of some tokens' embeddings.

What spreading a model may ask of one is in model_contract.py (`Tower`). A tower is no module: its modules are the
model's own, so that their weights keep the names that they would have without it. Single device; no ranks.
B batch, L length, H hidden, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from erniekit.parallel.plan import Rule


class LocalInsertion(nn.Module):
    """Slot `insert` of a tower. All tokens of a batch are here."""

    def forward(self, x_BLH: torch.Tensor, features_FH: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The embeddings with features in these places of the flattened [B * L] tokens."""
        flat = x_BLH.flatten(0, 1).index_copy(0, places, features_FH.to(x_BLH.dtype))
        return flat.view_as(x_BLH)


class LocalEncoder(nn.Module):
    """Slot `encode` of a tower: this rank encodes every item."""

    def forward(self, tower: InputTower, inputs: Any) -> torch.Tensor:
        return tower.encode_here(inputs)


class InputTower(ABC):
    """A Tower of model_contract.py, but for what a kind of input decides."""

    name: str
    prefixes: tuple[str, ...]
    plan: Mapping[str, Rule]
    adapts: tuple[str, ...] = ()
    recordable: Any = None

    def __init__(self) -> None:
        self.encode: nn.Module = LocalEncoder()
        self.insert: nn.Module = LocalInsertion()
        self.run: Callable[..., torch.Tensor] | None = None
        # Encode no item where a batch has none, too: set where ranks gather the weights together.
        self.always_encodes = False

    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """All that hold its weights."""

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.modules()

    @abstractmethod
    def encode_here(self, inputs: Any) -> torch.Tensor: ...

    @abstractmethod
    def counts(self, inputs: Any) -> list[int]: ...

    @abstractmethod
    def costs(self, inputs: Any) -> list[float]: ...

    @abstractmethod
    def select(self, inputs: Any, items: Sequence[int]) -> Any: ...

    @abstractmethod
    def nothing(self, x_BLH: torch.Tensor) -> Any:
        """Inputs of no item for a batch with these embeddings; None: there is nothing to encode."""

    def put_into(self, x_BLH: torch.Tensor, more: Any) -> torch.Tensor:
        """Embeddings with the features of a batch in their places. more: data.types.More, or None.

        A batch without inputs encodes no item where the weights are trained, so that they have gradients (of zeros) on
        every rank, whatever it reads."""
        inputs = None if more is None else more.input_of(self.name)
        if inputs is not None:
            features = self.encode(self, inputs)
        elif self.always_encodes or self._trains():
            if (inputs := self.nothing(x_BLH)) is None:
                return x_BLH
            features = self.encode_here(inputs)
        else:
            return x_BLH
        result: torch.Tensor = self.insert(x_BLH, features, inputs.places)
        return result

    def _trains(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(param.requires_grad for module in self.modules() for param in module.parameters())


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import Tower

    def _tower(tower: InputTower) -> Tower:
        return tower
