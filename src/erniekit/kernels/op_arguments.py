"""The arguments of an op by name: from one list come its schema, its calls and the order of its gradients.

Used by ops that take stored weights, or so many arguments that counted positions would be misread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from erniekit.kernels.stored import Stored
from erniekit.kernels.stored.base import op_fields

WEIGHT = "weight"  # the type of an argument that is a stored weight: several of the op's own


class OpArguments:
    """types: by name, as a schema writes them, or WEIGHT."""

    def __init__(self, **types: str) -> None:
        self.types = types
        flat: list[tuple[str, str]] = []
        self._first: dict[str, int] = {}
        for name, kind in types.items():
            self._first[name] = len(flat)
            flat += op_fields(name) if kind == WEIGHT else [(name, kind)]
        self.schema = ", ".join(f"{kind} {name}" for name, kind in flat)
        self.count = len(flat)
        self._is_tensor = [kind in ("Tensor", "Tensor?") for _, kind in flat]

    def flat(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """As the op is called."""
        out: list[Any] = []
        for name, kind in self.types.items():
            # unpacked, not `+=`: torch 2.11's compiler adds no NamedTuple to a list
            out = [*out, *values[name]] if kind == WEIGHT else [*out, values[name]]
        return tuple(out)

    def named(self, flat: Sequence[Any]) -> dict[str, Any]:
        """By name, from what the op was called with."""
        out: dict[str, Any] = {}
        for name, kind in self.types.items():
            first = self._first[name]
            out[name] = Stored(*flat[first : first + len(Stored._fields)]) if kind == WEIGHT else flat[first]
        return out

    def wanted(self, needs_input_grad: Sequence[Any], names: Sequence[str]) -> list[bool]:
        """Which of `names` need a gradient; of a stored weight its data may."""
        return [bool(needs_input_grad[self._first[name]]) for name in names]

    def gradients(self, found: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """As autograd takes them: one or None for each argument."""
        out: list[torch.Tensor | None] = [None] * self.count
        for name, gradient in found.items():
            out[self._first[name]] = gradient
        return tuple(out)

    def save(self, ctx: Any, inputs: Sequence[Any], *more: torch.Tensor) -> None:
        """For backward: tensors as autograd keeps them, the rest as it is."""
        ctx.rest = [None if tensor else value for tensor, value in zip(self._is_tensor, inputs, strict=True)]
        tensors = [value if tensor else None for tensor, value in zip(self._is_tensor, inputs, strict=True)]
        ctx.save_for_backward(*tensors, *more)

    def saved(self, ctx: Any) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
        """The inputs and `more`, as they were saved."""
        tensors = ctx.saved_tensors
        pairs = zip(self._is_tensor, tensors[: self.count], ctx.rest, strict=True)
        return [tensor if is_tensor else rest for is_tensor, tensor, rest in pairs], tensors[self.count :]
