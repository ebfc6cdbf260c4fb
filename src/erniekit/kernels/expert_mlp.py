"""The expert block in one op: take rows by expert, gate and up, SwiGLU, down, sum, with low-rank updates in the passes
over rows that happen anyway. Called by models/layers/experts.py.

A token's routing weight multiplies its activation before the down product, so the answer is a plain sum over choices
and the weight's gradient falls out of SwiGLU's backward. Kept for backward: the tokens, gate_up's answer without its
update, and the low ranks; the rest is computed again. T tokens, K choices, R = T * K rows, E experts, H hidden,
W width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels import expert_mlp_rows
from erniekit.kernels.available import has_triton
from erniekit.kernels.expert_mlp_rows import Low, Tail, spans
from erniekit.kernels.moe_permute import Order

HIGHEST_RANK = 128  # what the kernels hold in registers
READY = has_triton() and hasattr(F, "grouped_mm")


class Update(NamedTuple):
    """scale * B A on each expert's projection."""

    A: torch.Tensor  # [E, rank, in]
    B: torch.Tensor  # [E, out, rank]
    scale: float


def fits(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *updates: Update | None) -> bool:
    """Whether the kernels of an NVIDIA card take these."""
    factors = [t for update in updates if update is not None for t in (update.A, update.B)]
    sixteen = all(t.dtype == torch.bfloat16 for t in (x, gate_up, down, *factors))
    aligned = x.shape[1] % 8 == 0 and down.shape[2] % 8 == 0
    low = all(update.A.shape[1] <= HIGHEST_RANK for update in updates if update is not None)
    return READY and x.is_cuda and sixteen and aligned and low and x.shape[0] > 0


def expert_mlp(
    x: torch.Tensor,
    order: Order,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    of_gate: Update | None = None,
    of_up: Update | None = None,
    of_down: Update | None = None,
) -> torch.Tensor:
    """x [T, H], weights [T, K], gate_up [E, 2 * W, H], down [E, H, W] -> y [T, H] = sum over k of weight * expert(x).

    Every choice must be of some expert. Frozen tensors form no gradient.
    """
    updates = (of_gate, of_up, of_down)
    factors = [t for update in updates for t in (update[:2] if update else (None, None))]
    scales = [update.scale if update else 0.0 for update in updates]
    out: tuple[torch.Tensor, ...] = torch.ops.erniekit.expert_mlp(
        x, order.row_of, order.place_of, order.ends, weights, gate_up, down, *factors, scales
    )
    return out[0]


class TorchSteps:
    """The block's steps on any device."""

    take = staticmethod(expert_mlp_rows.take)
    activate = staticmethod(expert_mlp_rows.activate)
    activate_backward = staticmethod(expert_mlp_rows.activate_backward)
    sum_choices = staticmethod(expert_mlp_rows.sum_choices)
    outer = staticmethod(expert_mlp_rows.outer)
    product = staticmethod(expert_mlp_rows.product)

    @staticmethod
    def weight_gradient(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """grad [R, out], rows [R, in] -> [E, out, in]."""
        return torch.stack([grad[span].t() @ rows[span] for _, span in spans(ends)])


def cuda_steps(tail_in_product: bool = False) -> Any:
    """The same on an NVIDIA card. tail_in_product: a product with a low-rank tail is our own kernel, so that the tail
    costs no further pass over its rows; False: torch's, and a kernel that adds the tail."""
    from erniekit.kernels.triton import expert_products, expert_rows

    class Steps:
        take = staticmethod(expert_rows.take)
        activate = staticmethod(expert_rows.activate)
        activate_backward = staticmethod(expert_rows.activate_backward)
        sum_choices = staticmethod(expert_rows.sum_choices)
        outer = staticmethod(expert_products.outer)

        @staticmethod
        def product(
            rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Tail], scale: float = 1.0
        ) -> torch.Tensor:
            if tails and tail_in_product:
                return expert_products.product(rows, weight, ends, tails, scale)
            return expert_products.add_low(F.grouped_mm(rows, weight, offs=ends), tails, scale, ends)

        @staticmethod
        def weight_gradient(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(grad.t(), rows, offs=ends)

    return Steps


_found: dict[str, Any] = {"cpu": TorchSteps}  # by device type


def steps_of(x: torch.Tensor) -> Any:
    kind = x.device.type
    if kind not in _found:
        _found[kind] = cuda_steps() if kind == "cuda" else TorchSteps
    return _found[kind]


def _low(factor: torch.Tensor | None, scale: float) -> Low | None:
    """B [E, out, rank] as what its narrow rows are multiplied by."""
    return None if factor is None else (factor.transpose(1, 2), scale)


def _given(*lows: Low | None) -> list[Low]:
    return [low for low in lows if low is not None]


@torch.library.custom_op(
    "erniekit::expert_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor row_of, Tensor place_of, Tensor ends, Tensor weights, Tensor gate_up, Tensor down, "
    "Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b, float[] scales) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward(x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, scales):  # type: ignore[no-untyped-def]
    """y, and what backward wants: gate_up's rows, z of gate and up, z of down."""
    steps, k = steps_of(x), weights.shape[1]
    flat, x = weights.reshape(-1), x.contiguous()
    gate, up, below = _low(gate_b, scales[0]), _low(up_b, scales[1]), None if down_a is None else (down_a, 1.0)
    lows = [(factor, 1.0) for factor in (gate_a, up_a) if factor is not None]
    rows, z = steps.take(x, row_of, k, ends, lows)
    middle = steps.product(rows, gate_up.transpose(1, 2), ends, [])
    del rows
    act, z_down = steps.activate(middle, z, gate, up, below, flat, row_of, ends)
    tails = [] if down_b is None else [(z_down, down_b.transpose(1, 2))]
    answers = steps.product(act, down.transpose(1, 2), ends, tails, scales[2])
    del act
    return steps.sum_choices(answers, place_of, k), middle, z, z_down


@_forward.register_fake
def _(x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b, scales):  # type: ignore[no-untyped-def]
    ranks = [0 if factor is None else factor.shape[1] for factor in (gate_a, up_a, down_a)]
    rows = row_of.shape[0]
    shapes = (gate_up.shape[1], ranks[0] + ranks[1], ranks[2])
    return x.new_empty(x.shape), *(x.new_empty(rows, n) for n in shapes)


# What may want a gradient, in the order backward answers.
GRADED = ("x", "weights", "gate_up", "down", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
_PLACES = (0, 4, 5, 6, 7, 8, 9, 10, 11, 12)  # of those among the op's inputs


@torch.library.custom_op(
    "erniekit::expert_mlp_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor row_of, Tensor place_of, Tensor ends, Tensor weights, Tensor gate_up, "
    "Tensor down, Tensor? gate_a, Tensor? gate_b, Tensor? up_a, Tensor? up_b, Tensor? down_a, Tensor? down_b, "
    "Tensor middle, Tensor z, Tensor z_down, float[] scales, bool[] wanted) -> Tensor[]",
)
def _backward(  # type: ignore[no-untyped-def]
    grad, x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b,
    middle, z, z_down, scales, wanted,
):  # fmt: skip
    """The gradients `wanted` of GRADED, those alone."""
    steps, k, out = steps_of(x), weights.shape[1], {}
    want = dict(zip(GRADED, wanted))
    flat, x = weights.reshape(-1), x.contiguous()
    gate, up, below = _low(gate_b, scales[0]), _low(up_b, scales[1]), None if down_a is None else (down_a, 1.0)
    split = 0 if gate_a is None else gate_a.shape[1]

    rows, d_low = steps.take(grad.contiguous(), row_of, k, ends, _given(_low(down_b, scales[2])))
    d_act = steps.product(rows, down, ends, [])
    if want["down_b"]:
        (out["down_b"],) = steps.outer(rows, [(z_down, scales[2])], ends, turned=True)
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
    d_gate, d_up = d_middle.chunk(2, dim=1)
    halves = (("gate", d_gate, slice(0, split)), ("up", d_up, slice(split, None)))
    for (name, half, mine), scale in zip(halves, scales):
        if want[f"{name}_b"]:
            (out[f"{name}_b"],) = steps.outer(half, [(z[:, mine], scale)], ends, turned=True)
    asked = [(f"{name}_a", (d_z[:, mine], 1.0)) for name, _, mine in halves if want[f"{name}_a"]]
    if asked:
        out |= zip((name for name, _ in asked), steps.outer(x, [each for _, each in asked], ends, row_of, k))
    if want["gate_up"]:
        out["gate_up"] = steps.weight_gradient(d_middle, steps.take(x, row_of, k, ends, [])[0], ends)
    if want["x"]:
        tails = [(d_z[:, mine], a) for (_, _, mine), a in zip(halves, (gate_a, up_a)) if a is not None]
        d_rows = steps.product(d_middle, gate_up, ends, tails)
        out["x"] = steps.sum_choices(d_rows, place_of, k)
    return [out[name] for name in GRADED if want[name]]


@_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad, x, row_of, place_of, ends, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b,
    middle, z, z_down, scales, wanted,
):  # fmt: skip
    like = (x, weights, gate_up, down, gate_a, gate_b, up_a, up_b, down_a, down_b)
    return [tensor.new_empty(tensor.shape) for tensor, want in zip(like, wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scales = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, *unused: Any) -> tuple[torch.Tensor | None, ...]:
    grads: list[torch.Tensor | None] = [None] * 14
    if grad is not None:
        wanted = [bool(ctx.needs_input_grad[i]) for i in _PLACES]
        found = torch.ops.erniekit.expert_mlp_backward(grad, *ctx.saved_tensors, ctx.scales, wanted)
        for place, each in zip((i for i, want in zip(_PLACES, wanted) if want), found):
            grads[place] = each
    return tuple(grads)


_forward.register_autograd(_gradients, setup_context=_keep)
