"""The experts of one layer in one op: rows by expert, gate and up, SwiGLU, down, with low-rank updates in the passes
over rows that happen anyway. Every dispatch, stored kind, LoRA rank and device goes through it. Called by
models/layers/experts.py.

Its ends are gather and combine: tokens are taken by `row_of`, outputs summed by `place_of`. Rows that have travelled
to another rank are tokens of one choice and no weight, put in order and back. Choices may be without a row: their
experts are elsewhere, or the capacity was reached.

A token's routing weight multiplies its activation before the down product, so the output is a plain sum over choices
and the weight's gradient falls out of SwiGLU's backward. Kept for backward: the tokens, gate_up's output without its
update, and the low ranks; the rest is computed again. T tokens, K choices, R rows, E experts, H hidden, W width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from erniekit.kernels import expert_reference, few_tokens
from erniekit.kernels.available import shapes_of
from erniekit.kernels.low_rank import Low, Tail
from erniekit.kernels.moe_permute import Order
from erniekit.kernels.op_arguments import WEIGHT, OpArguments
from erniekit.kernels.quantised_rows import Rows, quantised, quantised_by_expert
from erniekit.kernels.selection import ExpertFacts, chosen
from erniekit.kernels.stored import Stored, kind_of


class Update(NamedTuple):
    """scale * B A on each expert's projection."""

    A: torch.Tensor  # [E, rank, in]
    B: torch.Tensor  # [E, out, rank]
    scale: float


def expert_mlp(
    x: torch.Tensor,
    order: Order,
    weights: torch.Tensor | None,
    gate_up: Stored,
    down: Stored,
    of_gate: Update | None = None,
    of_up: Update | None = None,
    of_down: Update | None = None,
) -> torch.Tensor:
    """x [T, H], weights [T, K], gate_up [E, 2 * W, H], down [E, H, W] -> y [T, H] = sum over k of weight * expert(x).

    weights None: one choice a token, which counts whole. order.row_of may be cut after the last row of an expert.
    Frozen tensors form no gradient.
    """
    return expert_mlp_and_seen(x, order, weights, gate_up, down, of_gate, of_up, of_down)[0]


def expert_mlp_and_seen(
    x: torch.Tensor,
    order: Order,
    weights: torch.Tensor | None,
    gate_up: Stored,
    down: Stored,
    *updates: Update | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and what the kinds of gate_up and down observe of their rows: fp32 [2], or empty."""
    rows = order.row_of.shape[0]
    if weights is not None and not any(updates) and few_tokens.multiplies(x, rows, gate_up, down):
        y = few_tokens.experts(x, *order, weights, gate_up.data, down.data)
        return y, y.new_empty(0, dtype=torch.float32)
    flat = _flat(x, order, weights, gate_up, down, updates)
    out: tuple[torch.Tensor, ...] = torch.ops.erniekit.expert_mlp(*flat)
    return out[0], out[-1]


def _flat(
    x: torch.Tensor,
    order: Order,
    weights: torch.Tensor | None,
    gate_up: Stored,
    down: Stored,
    updates: Sequence[Update | None],
) -> Sequence[Any]:
    values: dict[str, Any] = {"x": x, **order._asdict(), "weights": weights, "gate_up": gate_up, "down": down}
    for name, update in zip(("gate", "up", "down"), updates, strict=True):
        values[f"{name}_a"], values[f"{name}_b"] = update[:2] if update else (None, None)
    values["scales"] = [update.scale if update else 0.0 for update in updates]
    return ARGUMENTS.flat(values)


ARGUMENTS = OpArguments(
    x="Tensor", row_of="Tensor", place_of="Tensor", ends="Tensor", weights="Tensor?", gate_up=WEIGHT, down=WEIGHT,
    gate_a="Tensor?", gate_b="Tensor?", up_a="Tensor?", up_b="Tensor?", down_a="Tensor?", down_b="Tensor?",
    scales="float[]",
)  # fmt: skip
# What may need a gradient, in the order backward returns them.
GRADED = ("x", "weights", "gate_up", "down", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
# Defined by hand: what `custom_op` wraps around a function costs the host as much as a launch.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define(f"expert_mlp({ARGUMENTS.schema}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"expert_mlp_backward(Tensor grad, {ARGUMENTS.schema}, Tensor middle, Tensor z, Tensor z_down, bool[] wanted) "
    "-> Tensor[]"
)


@functools.cache
def _triton_steps() -> Any:
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

    return Steps


def in_triton(x: torch.Tensor, rows: int, width: int, factors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the steps between products run in Triton kernels. factors: A of each update."""
    given = [factor for factor in factors if factor is not None]
    dtype = functools.reduce(torch.promote_types, (factor.dtype for factor in given), x.dtype)
    facts = ExpertFacts(x.device, dtype, x.shape[1], width, tuple(factor.shape[1] for factor in given))
    return rows > 0 and chosen("experts", facts) == "triton"


def _steps(a: dict[str, Any]) -> Any | ModuleType:
    _, width = kind_of(a["down"]).shape(a["down"])
    factors = (a["gate_a"], a["up_a"], a["down_a"])
    return _triton_steps() if in_triton(a["x"], a["row_of"].shape[0], width, factors) else expert_reference


def expert_mlp_of_groups(
    x: torch.Tensor,
    order: Order,
    group_ends: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Stored,
    down: Stored,
    of_gate: Update | None,
    of_up: Update | None,
    of_down: Update | None,
) -> torch.Tensor:
    """As expert_mlp, where an expert's rows are in groups with updates of their own: several adapters in one batch.

    group_ends int32 [E * G]: one past the last row of each group, expert after expert; an update's A and B have so many
    matrices. For inference: no gradients.
    """
    return _run(_Op(_flat(x, order, weights, gate_up, down, (of_gate, of_up, of_down)), group_ends))[0]


class _Op:
    """One call: the arguments by name, and what forward and backward both make of them. low_ends: where the low-rank
    updates have other groups of rows than the experts."""

    def __init__(self, flat: Sequence[Any], low_ends: torch.Tensor | None = None) -> None:
        a = ARGUMENTS.named(flat)
        self.steps, self.a = _steps(a), a
        self.x: torch.Tensor = a["x"].contiguous()
        self.row_of, self.place_of, self.ends = a["row_of"], a["place_of"], a["ends"]
        self.grouped, self.low_ends = low_ends is not None, self.ends if low_ends is None else low_ends
        self.first, self.last = a["gate_up"], a["down"]
        self.scales: list[float] = a["scales"]
        given = a["weights"]
        self.k = 1 if given is None else given.shape[1]
        self.weights = self.x.new_ones(self.x.shape[0]) if given is None else given.reshape(-1)
        self.gate, self.up = _low(a["gate_b"], self.scales[0]), _low(a["up_b"], self.scales[1])
        self.below: Low | None = None if a["down_a"] is None else (a["down_a"], 1.0)

    def taken(self, tokens: torch.Tensor, weight: Stored, lows: list[Low]) -> tuple[Rows, torch.Tensor]:
        """Rows of tokens [T, in] as the product with `weight` takes them, and their low ranks. In fp8 tokens are
        rounded before they are taken: one rounding serves all choices, and half the bytes are written."""
        if not kind_of(weight).rows_in_fp8:
            return self.steps.take(tokens, self.row_of, self.k, self.low_ends, lows)  # type: ignore[no-any-return]
        small = quantised(tokens)
        return self.steps.take_fp8(tokens, small, self.row_of, self.k, self.low_ends, lows)  # type: ignore[no-any-return]

    def taken_turned(self, grad: torch.Tensor, weight: Stored, lows: list[Low]) -> tuple[Rows, torch.Tensor]:
        """The same for the turned product: each expert has its own factor, so that rows are rounded one by one."""
        factor = kind_of(weight).turned_factor(weight)
        keep = factor is None
        rows, low = self.steps.take(grad, self.row_of, self.k, self.ends, lows, keep)
        return (rows if factor is None else quantised_by_expert(grad, factor, self.ends, self.row_of, self.k)), low

    def product(self, rows: Rows, weight: Stored, tails: list[Tail] | None = None, scale: float = 1.0) -> torch.Tensor:
        """tails: low-rank updates, which are added and multiplied by `scale`."""
        kind, given = kind_of(weight), (weight, self.ends, self.x.dtype)
        out = kind.grouped_plus(rows, *given, tails, scale) if tails and not self.grouped else None
        return self._added(kind.grouped(rows, *given), tails, scale) if out is None else out

    def seen(self, rows: Rows, weight: Stored) -> torch.Tensor:
        """Empty of rows in fp8: a kind that takes those has their scales."""
        if not isinstance(rows, torch.Tensor):
            return self.x.new_empty(0, dtype=torch.float32)
        return kind_of(weight).seen(rows, self.ends)

    def weight_gradient(self, grad: torch.Tensor, rows: torch.Tensor, weight: Stored) -> torch.Tensor:
        return kind_of(weight).weight_gradient(grad, rows, weight, self.ends)

    def turned_product(
        self, rows: Rows, weight: Stored, tails: list[Tail] | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        kind, given = kind_of(weight), (weight, self.ends, self.x.dtype)
        out = kind.turned_grouped_plus(rows, *given, tails, scale) if tails else None
        return self._added(kind.turned_grouped(rows, *given), tails, scale) if out is None else out

    def _added(self, out: torch.Tensor, tails: list[Tail] | None, scale: float) -> torch.Tensor:
        added: torch.Tensor = self.steps.add_low(out, tails, scale, self.low_ends) if tails else out
        return added


def _low(factor: torch.Tensor | None, scale: float) -> Low | None:
    """B [E, out, rank] as what its narrow rows are multiplied by."""
    return None if factor is None else (factor.transpose(1, 2), scale)


def forward(*flat: Any) -> tuple[torch.Tensor, ...]:
    """y, what backward needs (gate_up's rows, z of gate and up, z of down), and what the kinds observe."""
    return _run(_Op(flat))


def _run(op: _Op) -> tuple[torch.Tensor, ...]:
    steps, a, ends = op.steps, op.a, op.ends
    rows, z = op.taken(op.x, op.first, [(factor, 1.0) for factor in (a["gate_a"], a["up_a"]) if factor is not None])
    middle, observed = op.product(rows, op.first), [op.seen(rows, op.first)]
    del rows
    act, z_down = steps.activate(middle, z, op.gate, op.up, op.below, op.weights, op.row_of, op.low_ends)
    tails = [] if a["down_b"] is None else [(z_down, a["down_b"].transpose(1, 2))]
    outputs = op.product(act, op.last, tails, op.scales[2])
    observed.append(op.seen(act, op.last))
    del act
    return steps.sum_choices(outputs, op.place_of, op.k, ends), middle, z, z_down, torch.cat(observed)


@shapes_of("erniekit::expert_mlp")
def _(*flat: Any) -> tuple[torch.Tensor, ...]:
    a = ARGUMENTS.named(flat)
    ranks = [0 if a[name] is None else a[name].shape[1] for name in ("gate_a", "up_a", "down_a")]
    x, rows, (both, _) = a["x"], a["row_of"].shape[0], kind_of(a["gate_up"]).shape(a["gate_up"])
    kept = (x.new_empty(rows, n) for n in (both, ranks[0] + ranks[1], ranks[2]))
    observed = sum(kind_of(a[name]).seen(x).numel() for name in ("gate_up", "down"))
    return x.new_empty(x.shape), *kept, x.new_empty(observed, dtype=torch.float32)


def backward(grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    """The gradients `wanted` of GRADED, only those."""
    flat, (middle, z, z_down, wanted) = given[: ARGUMENTS.count], given[ARGUMENTS.count :]
    op, out, want = _Op(flat), dict[str, torch.Tensor](), dict(zip(GRADED, wanted))
    steps, a, x, ends, scales = op.steps, op.a, op.x, op.ends, op.scales
    split = 0 if a["gate_a"] is None else a["gate_a"].shape[1]

    grad, low = grad.contiguous(), _low(a["down_b"], scales[2])
    rows, d_low = op.taken_turned(grad, op.last, [] if low is None else [low])
    d_act = op.turned_product(rows, op.last)
    if want["down_b"]:
        # Of rows in fp8 the tokens they came from are taken once more: adapters' gradients see nothing of fp8.
        wide = (rows, ends) if isinstance(rows, torch.Tensor) else (grad, ends, op.row_of, op.k)
        (out["down_b"],) = steps.outer(wide[0], [(z_down, scales[2])], *wide[1:], turned=True)
    if not want["down"]:
        del rows
    d_middle, act, d_weights, d_z = steps.activate_backward(
        d_act, d_low, middle, z, op.gate, op.up, op.below, op.weights, op.row_of, ends, want["down"] or want["down_a"]
    )
    del d_act
    if want["weights"]:
        out["weights"] = d_weights.view_as(a["weights"])
    if want["down"]:
        assert isinstance(rows, torch.Tensor), "what is trained is multiplied with rows as they are"
        out["down"] = op.weight_gradient(rows, act, op.last)
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
    products = [(f"{name}_a", (d_z[:, mine], 1.0)) for name, mine in halves if want[f"{name}_a"]]
    if products:
        found = steps.outer(x, [each for _, each in products], ends, op.row_of, op.k)
        out |= zip((name for name, _ in products), found)
    if want["gate_up"]:
        out["gate_up"] = op.weight_gradient(d_middle, steps.take(x, op.row_of, op.k, ends, [])[0], op.first)
    if want["x"]:
        tails = [(d_z[:, mine], a[f"{name}_a"]) for name, mine in halves if a[f"{name}_a"] is not None]
        out["x"] = steps.sum_choices(op.turned_product(d_middle, op.first, tails), op.place_of, op.k, ends)
    return [out[name] for name in GRADED if want[name]]


def _data(a: dict[str, Any], name: str) -> torch.Tensor:
    value: torch.Tensor = a[name].data if isinstance(a[name], Stored) else a[name]
    return value


@shapes_of("erniekit::expert_mlp_backward")
def _(grad: torch.Tensor, *given: Any) -> list[torch.Tensor]:
    a, wanted = ARGUMENTS.named(given[: ARGUMENTS.count]), given[-1]
    return [_data(a, name).new_empty(_data(a, name).shape) for name, want in zip(GRADED, wanted) if want]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ARGUMENTS.save(ctx, inputs, *output[1:-1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return ARGUMENTS.gradients({})
    wanted = ARGUMENTS.wanted(ctx.needs_input_grad, GRADED)
    flat, kept = ARGUMENTS.saved(ctx)
    found = torch.ops.erniekit.expert_mlp_backward(grad, *flat, *kept, wanted)
    return ARGUMENTS.gradients(dict(zip((name for name, want in zip(GRADED, wanted) if want), found)))


_LIBRARY.impl("expert_mlp", forward, "CompositeExplicitAutograd")
_LIBRARY.impl("expert_mlp_backward", backward, "CompositeExplicitAutograd")
torch.library.register_autograd("erniekit::expert_mlp", _gradients, setup_context=_keep)
