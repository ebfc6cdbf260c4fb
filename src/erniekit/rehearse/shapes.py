"""Tensors without memory for a rehearsal at full size: weights and activations have shapes only, while whole numbers
that decide what is done (token ids, document bounds, routes to experts) are really computed.

`shapes_only()` is entered around building a model and running a step on the CPU. What the host reads of a tensor that
has no values is made up: losses and norms are 1, and a router sends its tokens to all experts in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.parallel import collectives

SMALL = 4096  # elements of a floating-point tensor that is still really computed
MOST = 1 << 24  # elements of a tensor of whole numbers that is

PLAIN = (torch.Tensor, torch.nn.Parameter)

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default
_META = torch.device("meta")
# Inside these our own collectives are called; running only the op's shape rule would hide them.
OPENED = {
    torch.ops.erniekit.sum_over.default: collectives.sum_over,
    torch.ops.erniekit.gather_over.default: collectives.gather_over,
    torch.ops.erniekit.scatter_sum_over.default: collectives.scatter_sum_over,
}


@contextmanager
def shapes_only() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), _ShapesOnly():
        yield


class _ShapesOnly(TorchDispatchMode):
    """Above FakeTensorMode: decides what is computed for real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device_of and isinstance(args[0], FakeTensor):  # of every op: answered here, it takes half as long
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        run = OPENED.get(func, func)
        if not types and _is_real(func, args, kwargs):
            with unset_fake_temporarily():
                return run(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return _made_up(args[0].dtype)
        out = run(*args, **kwargs)
        if func is _aten.topk.default:
            return out[0], _in_turn(out[1].shape, args[0].shape[-1])
        return out


def _is_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether to compute an op none of whose arguments is a shape-only tensor."""
    tensors = [x for x in _leaves((*args, *kwargs.values())) if isinstance(x, torch.Tensor)]
    if _on_meta(tensors, kwargs):
        return True  # a model before it is spread: fully_shard and Module.to_empty need torch's own tensors
    if tensors:
        return all(_has_values(x) for x in tensors)
    return _makes_numbers(func, args, kwargs)


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _on_meta(tensors: list[torch.Tensor], kwargs: Any) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return bool(tensors) and all(type(x) in PLAIN and x.is_meta for x in tensors)


def _has_values(x: torch.Tensor) -> bool:
    if type(x) not in PLAIN or x.device.type != "cpu":
        return False
    return x.numel() <= (SMALL if x.is_floating_point() else MOST)


def _makes_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """A factory of whole numbers."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    dtype = kwargs.get("dtype")
    if func.overloadpacket is _aten.arange and dtype is None:
        return all(isinstance(value, int) for value in args)
    size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    small = prod(size) <= MOST
    return small and dtype is not None and not (dtype.is_floating_point or dtype.is_complex)


def _made_up(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _in_turn(shape: torch.Size, experts: int) -> torch.Tensor:
    """[..., choices]: the experts one after the other, so that each is chosen equally often."""
    with unset_fake_temporarily():
        return (torch.arange(shape.numel()) % experts).view(shape)
