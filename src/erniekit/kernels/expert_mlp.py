"""The expert block in one op: take rows by expert, gate and up, SwiGLU, down, sum, with low-rank updates in the passes
over rows that happen anyway. Called by models/layers/experts.py.

A token's routing weight multiplies its activation before the down product, so the answer is a plain sum over choices
and the weight's gradient falls out of SwiGLU's backward. Kept for backward: the tokens, gate_up's answer without its
update, and the low ranks; the rest is computed again. Frozen matrices may be in fp8 (expert_fp8.py).
T tokens, K choices, R = T * K rows, E experts, H hidden,
W width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels import expert_fp8, expert_mlp_rows, hopper_products
from erniekit.kernels.available import has_triton
from erniekit.kernels.expert_fp8 import EXTRAS, Matrices, matrices
from erniekit.kernels.expert_mlp_rows import Low, Tail, spans
from erniekit.kernels.fp8_product import Fp8Weight
from erniekit.kernels.grouped_gemm import ALIGNED
from erniekit.kernels.moe_permute import Order

HIGHEST_RANK = 128  # what the kernels hold in registers
READY = has_triton() and hasattr(F, "grouped_mm")
Weight = torch.Tensor | Fp8Weight


class Update(NamedTuple):
    """scale * B A on each expert's projection."""

    A: torch.Tensor  # [E, rank, in]
    B: torch.Tensor  # [E, out, rank]
    scale: float


def fits(x: torch.Tensor, gate_up: Weight, down: Weight, *updates: Update | None) -> bool:
    """Whether the kernels of an NVIDIA card take these."""
    factors = [t for update in updates if update is not None for t in (update.A, update.B)]
    plain = [weight for weight in (gate_up, down) if not isinstance(weight, Fp8Weight)]
    sixteen = all(t.dtype == torch.bfloat16 for t in (x, *plain, *factors))
    aligned = x.shape[1] % ALIGNED == 0 and matrices(down).rows.shape[2] % ALIGNED == 0
    low = all(update.A.shape[1] <= HIGHEST_RANK for update in updates if update is not None)
    return READY and x.is_cuda and sixteen and aligned and low and x.shape[0] > 0


def expert_mlp(
    x: torch.Tensor,
    order: Order,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    of_gate: Update | None = None,
    of_up: Update | None = None,
    of_down: Update | None = None,
) -> torch.Tensor:
    """x [T, H], weights [T, K], gate_up [E, 2 * W, H], down [E, H, W] -> y [T, H] = sum over k of weight * expert(x).

    Every choice must be of some expert. Frozen tensors form no gradient.
    """
    given = as_given(x, order, weights, gate_up, down, of_gate, of_up, of_down)
    out: tuple[torch.Tensor, ...] = torch.ops.erniekit.expert_mlp(*given)
    return out[0]


def as_given(
    x: torch.Tensor, order: Order, weights: torch.Tensor, gate_up: Weight, down: Weight, *updates: Update | None
) -> tuple[Any, ...]:
    """What the op is called with."""
    factors = [t for update in updates for t in (update[:2] if update else (None, None))]
    scales = [update.scale if update else 0.0 for update in updates]
    first, second = matrices(gate_up), matrices(down)
    tokens = (x, order.row_of, order.place_of, order.ends, weights)
    return *tokens, first.rows, second.rows, *factors, scales, *first[1:], *second[1:]


class TorchSteps:
    """The block's steps in plain torch."""

    take = staticmethod(expert_mlp_rows.take)
    take_fp8 = staticmethod(expert_fp8.take)
    activate = staticmethod(expert_mlp_rows.activate)
    activate_backward = staticmethod(expert_mlp_rows.activate_backward)
    sum_choices = staticmethod(expert_mlp_rows.sum_choices)
    outer = staticmethod(expert_mlp_rows.outer)
    outer_of_halves = staticmethod(expert_mlp_rows.outer_of_halves)
    product = staticmethod(expert_mlp_rows.product)
    add_low = staticmethod(expert_mlp_rows.add_low)

    @staticmethod
    def weight_gradient(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """grad [R, out], rows [R, in] -> [E, out, in]."""
        return torch.stack([grad[span].t() @ rows[span] for _, span in spans(ends)])


def cuda_steps() -> Any:
    """The same on an NVIDIA card."""
    from erniekit.kernels.triton import expert_products, expert_rows

    class Steps:
        take = staticmethod(expert_rows.take)
        take_fp8 = staticmethod(expert_rows.take_fp8)
        activate = staticmethod(expert_rows.activate)
        activate_backward = staticmethod(expert_rows.activate_backward)
        sum_choices = staticmethod(expert_rows.sum_choices)
        outer = staticmethod(expert_products.outer)
        outer_of_halves = staticmethod(expert_products.outer_of_halves)
        add_low = staticmethod(expert_products.add_low)

        @staticmethod
        def product(
            rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Tail], scale: float = 1.0
        ) -> torch.Tensor:
            return expert_products.add_low(hopper_products.grouped(rows, weight, ends), tails, scale, ends)

        @staticmethod
        def weight_gradient(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(grad.t(), rows, offs=ends)

    return Steps


@functools.cache
def steps_of(device: str) -> Any:
    return cuda_steps() if device == "cuda" else TorchSteps


def _low(factor: torch.Tensor | None, scale: float) -> Low | None:
    """B [E, out, rank] as what its narrow rows are multiplied by."""
    return None if factor is None else (factor.transpose(1, 2), scale)


def _given(*lows: Low | None) -> list[Low]:
    return [low for low in lows if low is not None]


# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_FACTORS = "Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b"
_TENSORS = "Tensor x, Tensor row_of, Tensor place_of, Tensor ends, Tensor weights, Tensor gate_up, Tensor down"
INPUTS = f"{_TENSORS}, {_FACTORS}"
TENSORS = 13  # of those
GIVEN = TENSORS + 1 + 2 * EXTRAS  # with scales and what fp8 matrices have beside
IN_FP8 = ", ".join(f"Tensor? {w}_{part}=None" for w in ("gate_up", "down") for part in Matrices._fields[1:])
_LIBRARY.define(f"expert_mlp({INPUTS}, float[] scales, {IN_FP8}) -> (Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"expert_mlp_backward(Tensor grad, {INPUTS}, Tensor middle, Tensor z, Tensor z_down, float[] scales, "
    f"bool[] wanted, {IN_FP8}) -> Tensor[]"
)


def _held(gate_up: torch.Tensor, down: torch.Tensor, in_fp8: Sequence[torch.Tensor | None]) -> list[Matrices]:
    return [Matrices(gate_up, *in_fp8[:EXTRAS]), Matrices(down, *in_fp8[EXTRAS:])]


def forward(  # type: ignore[no-untyped-def]
    x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, scales, *in_fp8
):
    """y, and what backward wants: gate_up's rows, z of gate and up, z of down."""
    (first, last), steps, k = _held(gate_up, down, in_fp8), steps_of(x.device.type), weights.shape[1]
    flat, x = weights.reshape(-1), x.contiguous()
    gate, up, below = _low(gate_b, scales[0]), _low(up_b, scales[1]), None if down_a is None else (down_a, 1.0)
    lows = [(factor, 1.0) for factor in (gate_a, up_a) if factor is not None]
    rows, z = expert_fp8.taken(steps, x, row_of, k, ends, lows, first)
    middle = expert_fp8.forward(steps, rows, first, ends, [], 1.0, x.dtype)
    del rows
    act, z_down = steps.activate(middle, z, gate, up, below, flat, row_of, ends)
    tails = [] if down_b is None else [(z_down, down_b.transpose(1, 2))]
    answers = expert_fp8.forward(steps, act, last, ends, tails, scales[2], x.dtype)
    del act
    return steps.sum_choices(answers, place_of, k), middle, z, z_down


@torch.library.register_fake("erniekit::expert_mlp")
def empty_answers(  # type: ignore[no-untyped-def]
    x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, *_
):
    ranks = [0 if factor is None else factor.shape[1] for factor in (gate_a, up_a, down_a)]
    rows = row_of.shape[0]
    shapes = (gate_up.shape[1], ranks[0] + ranks[1], ranks[2])
    return x.new_empty(x.shape), *(x.new_empty(rows, n) for n in shapes)


# What may want a gradient, in the order backward answers.
GRADED = ("x", "weights", "gate_up", "down", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
PLACES = (0, 4, 5, 6, 7, 8, 9, 10, 11, 12)  # of those among the op's inputs


def backward(  # type: ignore[no-untyped-def]
    grad, x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b,
    middle, z, z_down, scales, wanted, *in_fp8,
):  # fmt: skip
    """The gradients `wanted` of GRADED, those alone."""
    (first, last), steps, k, out = _held(gate_up, down, in_fp8), steps_of(x.device.type), weights.shape[1], {}
    want = dict(zip(GRADED, wanted))
    flat, x = weights.reshape(-1), x.contiguous()
    gate, up, below = _low(gate_b, scales[0]), _low(up_b, scales[1]), None if down_a is None else (down_a, 1.0)
    split = 0 if gate_a is None else gate_a.shape[1]

    grad, low = grad.contiguous(), _given(_low(down_b, scales[2]))
    rows, d_low = expert_fp8.taken(steps, grad, row_of, k, ends, low, last)
    d_act = expert_fp8.backward(steps, rows, last, ends, [], x.dtype)
    if want["down_b"]:
        # Of rows in fp8 the tokens they came from are taken once more: adapters' gradients see nothing of fp8.
        wide = (grad, ends, row_of, k) if isinstance(rows, tuple) else (rows, ends)
        (out["down_b"],) = steps.outer(wide[0], [(z_down, scales[2])], *wide[1:], turned=True)
    if not want["down"]:
        del rows
    d_middle, act, d_weights, d_z = steps.activate_backward(
        d_act, d_low, middle, z, gate, up, below, flat, row_of, ends, want["down"] or want["down_a"]
    )
    del d_act
    if want["weights"]:
        out["weights"] = d_weights.view_as(weights)
    if want["down"]:
        out["down"] = steps.weight_gradient(rows, act, ends)
        del rows
    if want["down_a"]:
        (out["down_a"],) = steps.outer(act, [(d_low, 1.0)], ends)
    del act
    halves = (("gate", slice(0, split)), ("up", slice(split, None)))
    if want["gate_b"] and want["up_b"]:
        out["gate_b"], out["up_b"] = steps.outer_of_halves(d_middle, z, split, tuple(scales[:2]), ends)
    else:
        for (name, mine), half, scale in zip(halves, d_middle.chunk(2, dim=1), scales):
            if want[f"{name}_b"]:
                (out[f"{name}_b"],) = steps.outer(half, [(z[:, mine], scale)], ends, turned=True)
    asked = [(f"{name}_a", (d_z[:, mine], 1.0)) for name, mine in halves if want[f"{name}_a"]]
    if asked:
        out |= zip((name for name, _ in asked), steps.outer(x, [each for _, each in asked], ends, row_of, k))
    if want["gate_up"]:
        out["gate_up"] = steps.weight_gradient(d_middle, steps.take(x, row_of, k, ends, [])[0], ends)
    if want["x"]:
        tails = [(d_z[:, mine], a) for (_, mine), a in zip(halves, (gate_a, up_a)) if a is not None]
        d_rows = expert_fp8.backward(steps, d_middle, first, ends, tails, x.dtype)
        out["x"] = steps.sum_choices(d_rows, place_of, k)
    return [out[name] for name in GRADED if want[name]]


@torch.library.register_fake("erniekit::expert_mlp_backward")
def _(  # type: ignore[no-untyped-def]
    grad, x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b,
    middle, z, z_down, scales, wanted, *in_fp8,
):  # fmt: skip
    like = (x, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b)
    return [tensor.new_empty(tensor.shape) for tensor, want in zip(like, wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    tensors, (ctx.scales, *in_fp8) = inputs[:TENSORS], inputs[TENSORS:]
    ctx.save_for_backward(*tensors, *output[1:], *in_fp8)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, *unused: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * GIVEN
    wanted = [bool(ctx.needs_input_grad[i]) for i in PLACES]
    known, in_fp8 = ctx.saved_tensors[: TENSORS + 3], ctx.saved_tensors[TENSORS + 3 :]
    found = torch.ops.erniekit.expert_mlp_backward(grad, *known, ctx.scales, wanted, *in_fp8)
    return in_places(found, PLACES, wanted, GIVEN)


def in_places(
    found: Sequence[torch.Tensor], places: Sequence[int], wanted: Sequence[bool], count: int
) -> tuple[torch.Tensor | None, ...]:
    """The gradients found, those wanted of `places`, as autograd takes them: one or None for each of `count` inputs."""
    grads: list[torch.Tensor | None] = [None] * count
    for place, each in zip((place for place, want in zip(places, wanted) if want), found):
        grads[place] = each
    return tuple(grads)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("expert_mlp", forward, _device)
    _LIBRARY.impl("expert_mlp_backward", backward, _device)
torch.library.register_autograd("erniekit::expert_mlp", _gradients, setup_context=_keep)
