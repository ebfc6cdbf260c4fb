"""Routed and shared experts at once: the shared ones, a frozen block with low-rank updates, on a stream of their own
beside the routed ones, on the way back too. Called by models/layers/moe.py.

Both streams meet before the op ends, so that nobody outside sees the second. It fills the gaps of kernels that wait for
memory: 1 % of both blocks' time on an H200, which its power limits, and 5 % over a base in fp8. T tokens, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from erniekit.kernels import expert_mlp, lora_linear
from erniekit.kernels.swiglu import swiglu, swiglu_gradient

Small = TypeVar("Small")
Large = TypeVar("Large")
LINEAR = 8  # what lora_linear.as_given gives: weight, A, B, scales, ranks and the rest of an fp8 weight
ROUTED = expert_mlp.GIVEN
SHARED = 1 + 2 * LINEAR  # tokens, gate_up, down
# What may want a gradient, of the shared experts: tokens, and A and B of both products.
PLACES = (*expert_mlp.PLACES, *(ROUTED + i for i in (0, 2, 3, 2 + LINEAR, 3 + LINEAR)))


def experts_and_shared(
    routed: tuple[Any, ...], x: torch.Tensor, gate_up: tuple[Any, ...], down: tuple[Any, ...]
) -> Any:
    """routed: of expert_mlp.as_given; gate_up, down: of lora_linear.as_given, no bias -> what the routed and what the
    shared experts say of x [T, H], each [T, H]."""
    out = torch.ops.erniekit.experts_and_shared(*routed, x, *gate_up, *down)
    return out[0], out[1]


def at_once(device: torch.device, small: Callable[[], Small], large: Callable[[], Large]) -> tuple[Small, Large]:
    """Memory is safe: what either made or read is next written on a stream that has waited for both."""
    if device.type != "cuda":
        return small(), large()
    here, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        one = small()
    other = large()
    here.wait_stream(aside)
    return one, other


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_ROUTED = f"{expert_mlp.INPUTS}, float[] scales, {expert_mlp.IN_FP8}".replace("=None", "")


def _linear_words(name: str) -> str:
    rest = ", ".join(f"Tensor? {name}_{part}" for part in ("row_scale", "columns", "column_scale"))
    return f"Tensor {name}, Tensor {name}_A, Tensor {name}_B, float[] {name}_scales, int[] {name}_ranks, {rest}"


_GIVEN = f"{_ROUTED}, Tensor own_x, {_linear_words('own_gate_up')}, {_linear_words('own_down')}"
_KEPT = ("middle", "z", "z_down", "own_middle", "own_low", "own_act", "own_low_down")
_LIBRARY.define(f"experts_and_shared({_GIVEN}) -> ({', '.join(['Tensor'] * (2 + len(_KEPT)))})")
_LIBRARY.define(
    f"experts_and_shared_backward(Tensor grad, Tensor own_grad, {_GIVEN}, "
    f"{', '.join(f'Tensor kept_{name}' for name in _KEPT)}, bool[] wanted) -> Tensor[]"
)


def _linear(x: torch.Tensor, held: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *rest: Any) -> Any:
    return lora_linear.forward(x, held, None, A, B, *rest)


def _shared(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """The answer, and what backward wants: gate_up's rows, their low ranks, the activation, its low ranks."""
    middle, low = _linear(x.contiguous(), *given[:LINEAR])
    act = swiglu(middle)
    y, low_down = _linear(act, *given[LINEAR:])
    return y, middle, low, act, low_down


def _linear_back(
    grad: torch.Tensor, x: torch.Tensor, low: torch.Tensor, given: tuple[Any, ...], want: list[bool]
) -> list[torch.Tensor]:
    """Of x, A and B, those wanted."""
    held, A, B, scales, ranks, *in_fp8 = given
    wanted = [want[0], False, False, *want[1:]]
    return lora_linear.backward(grad, x, low, held, A, B, scales, ranks, wanted, *in_fp8)


def _shared_back(
    grad: torch.Tensor, given: tuple[Any, ...], kept: tuple[torch.Tensor, ...], want: list[bool]
) -> list[torch.Tensor]:
    """Of the tokens, and A and B of gate_up and of down, those wanted."""
    (x, *rest), (middle, low, act, low_down) = given, kept
    d_act, *of_down = _linear_back(grad, act, low_down, tuple(rest[LINEAR:]), [True, *want[3:]])
    d_middle = swiglu_gradient(d_act, middle)
    return _linear_back(d_middle, x.contiguous(), low, tuple(rest[:LINEAR]), want[:3]) + of_down


def _forward(*given: Any) -> tuple[torch.Tensor, ...]:
    own, routed = at_once(
        given[0].device, lambda: _shared(*given[ROUTED:]), lambda: expert_mlp.forward(*given[:ROUTED])
    )
    return routed[0], own[0], *routed[1:], *own[1:]


def _backward(grad: torch.Tensor, own_grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    """The gradients wanted of PLACES."""
    routed, shared = given[:ROUTED], given[ROUTED : ROUTED + SHARED]
    *kept, wanted = given[ROUTED + SHARED :]
    tensors, (scales, *in_fp8) = routed[: expert_mlp.TENSORS], routed[expert_mlp.TENSORS :]
    split = len(expert_mlp.PLACES)
    own, of_routed = at_once(
        grad.device,
        lambda: _shared_back(own_grad, shared, tuple(kept[3:]), wanted[split:]),
        lambda: expert_mlp.backward(grad, *tensors, *kept[:3], scales, wanted[:split], *in_fp8),
    )
    return [*of_routed, *own]


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("experts_and_shared", _forward, _device)
    _LIBRARY.impl("experts_and_shared_backward", _backward, _device)


@torch.library.register_fake("erniekit::experts_and_shared")
def _(*given: Any) -> tuple[torch.Tensor, ...]:
    y, *kept = expert_mlp.empty_answers(*given[:ROUTED])
    x, gate_up, gate_up_A, down, down_A = (given[ROUTED + i] for i in (0, 1, 2, 1 + LINEAR, 2 + LINEAR))
    widths = (gate_up.shape[0], gate_up_A.shape[0], down.shape[1], down_A.shape[0])
    own = x.new_empty(x.shape[0], down.shape[0])
    return y, own, *kept, *(x.new_empty(x.shape[0], width) for width in widths)


@torch.library.register_fake("erniekit::experts_and_shared_backward")
def _(grad: torch.Tensor, own_grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    return [given[place].new_empty(given[place].shape) for place, want in zip(PLACES, given[-1]) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.lists = {place: value for place, value in enumerate(inputs) if isinstance(value, (list, tuple))}
    tensors = [None if place in ctx.lists else value for place, value in enumerate(inputs)]
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, own_grad: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None and own_grad is None:
        return (None,) * (ROUTED + SHARED)
    grad, own_grad = (torch.zeros_like(ctx.saved_tensors[0]) if g is None else g for g in (grad, own_grad))
    wanted = [bool(ctx.needs_input_grad[place]) for place in PLACES]
    given = [ctx.lists.get(place, tensor) for place, tensor in enumerate(ctx.saved_tensors)]
    found = torch.ops.erniekit.experts_and_shared_backward(grad, own_grad, *given, wanted)
    return expert_mlp.in_places(found, PLACES, wanted, ROUTED + SHARED)


torch.library.register_autograd("erniekit::experts_and_shared", _gradients, setup_context=_keep)
