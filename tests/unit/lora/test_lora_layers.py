from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.kernels.moe_permute import by_expert
from erniekit.lora.layers import SHARED, LoRAExperts, LoRALinear, Pair
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.linear import FusedLinear, Linear

PARTS = (("q_proj", 6), ("k_proj", 4), ("v_proj", 4))


def filled(parts: tuple[tuple[str, int], ...], base: nn.Linear, rank: int = 2, scale: float = 1.5) -> Pair:
    pair = Pair(parts, rank, scale, like=base.weight)
    nn.init.normal_(pair.A)
    nn.init.normal_(pair.B)
    return pair


def expected(base: nn.Linear, updates: dict[str, Pair], x: torch.Tensor) -> torch.Tensor:
    """The definition, projection by projection."""
    y, row = base(x), 0
    for part, rows in base.parts:
        for pair in updates.values():
            own = [name for name, _ in pair.parts]
            if part in own:
                start = sum(n for _, n in pair.parts[: own.index(part)])
                delta = pair.scale * pair.B[start : start + rows] @ pair.A
                y = torch.cat([y[..., :row], y[..., row : row + rows] + x @ delta.t(), y[..., row + rows :]], -1)
        row += rows
    return y


@pytest.mark.parametrize(
    "groups",
    [
        {"q_proj": ["q_proj"], "k_proj": ["k_proj"], "v_proj": ["v_proj"]},
        {"v_proj": ["v_proj"]},
        {SHARED: ["q_proj", "k_proj", "v_proj"]},
        {SHARED: ["q_proj", "v_proj"]},
    ],
)
def test_output_is_the_base_plus_each_projections_own_update(groups: dict[str, list[str]]) -> None:
    torch.manual_seed(0)
    base = FusedLinear(5, PARTS, bias=True)
    sizes = dict(PARTS)
    pairs = {key: filled(tuple((p, sizes[p]) for p in parts), base) for key, parts in groups.items()}
    x = torch.randn(2, 3, 5)
    # one GEMM against three small ones: only the order of fp32 sums differs
    torch.testing.assert_close(LoRALinear(base, base.parts, pairs)(x), expected(base, pairs, x), atol=1e-5, rtol=0)


def test_pairs_may_differ_in_rank_and_scale() -> None:
    torch.manual_seed(0)
    base = FusedLinear(5, PARTS, bias=False)
    pairs = {
        "q_proj": filled((("q_proj", 6),), base, rank=1, scale=0.5),
        "v_proj": filled((("v_proj", 4),), base, rank=4, scale=3.0),
    }
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(LoRALinear(base, base.parts, pairs)(x), expected(base, pairs, x), atol=1e-5, rtol=0)


def test_adapters_take_the_dtype_of_the_weight_they_are_on() -> None:
    base = Linear(5, 6).to(torch.bfloat16)
    module = LoRALinear(base, (("o_proj", 6),), {"o_proj": filled((("o_proj", 6),), base)})
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module(torch.randn(2, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


class OpsRun(TorchDispatchMode):
    """The names of the ops that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def in_one(module: LoRALinear, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The answer, and whether the op gave it."""
    with OpsRun() as ops:
        y = module(x)
    return y, "erniekit::lora_linear" in ops.names


def adapted() -> tuple[LoRALinear, torch.Tensor]:
    torch.manual_seed(0)
    base = FusedLinear(5, PARTS, bias=True).requires_grad_(False)
    pairs = {part: filled(((part, rows),), base) for part, rows in PARTS if part != "k_proj"}
    return LoRALinear(base, base.parts, pairs), torch.randn(2, 3, 5, requires_grad=True)


def test_a_plain_base_and_its_pairs_are_one_op_and_compiled_too() -> None:
    module, x = adapted()
    want, one = in_one(module, x)
    assert one
    targets = []

    def seen(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        targets.extend(node.target for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    got = torch.compile(module, backend=seen, fullgraph=True)(x)
    assert torch.ops.erniekit.lora_linear in targets
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    inputs, upstream = [x, *module.lora.parameters()], torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, inputs, upstream) for y in (got, want)), atol=0, rtol=0)


class Wrapped(torch.Tensor):
    """A tensor with ways of its own, as DTensor and quantised weights are."""


def watch_base(module: LoRALinear) -> None:
    module.base.register_forward_hook(lambda base, args, y: y * 2)


def wrap_weight(module: LoRALinear) -> None:
    module.base.weight = nn.Parameter(module.base.weight.detach().as_subclass(Wrapped), requires_grad=False)


@pytest.mark.parametrize("change", [watch_base, wrap_weight])
def test_a_base_with_hooks_or_a_tensor_of_another_class_is_called_itself(change: Callable[[LoRALinear], None]) -> None:
    module, x = adapted()
    change(module)
    got, one = in_one(module, x)
    assert not one
    plain, _ = adapted()
    want = module.base(x) + in_one(plain, x)[0] - plain.base(x)
    torch.testing.assert_close(torch.Tensor(got), torch.Tensor(want), atol=1e-5, rtol=0)


def test_autocast_and_transforms_are_left_to_torch() -> None:
    module, x = adapted()
    want, _ = in_one(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, one = in_one(module, x)
        assert (one, y.dtype) == (False, torch.bfloat16)
    torch.testing.assert_close(torch.vmap(module)(x), want, atol=1e-5, rtol=0)
    gradient = torch.func.grad(lambda t: module(t).square().sum())(x.detach())
    torch.testing.assert_close(gradient, *torch.autograd.grad(want.square().sum(), x), atol=1e-4, rtol=1e-5)


def test_without_its_adapters_the_base_answers_alone_in_the_bits_of_adapters_of_zero() -> None:
    module, x = adapted()
    module.active = False
    y, one = in_one(module, x)
    assert one
    torch.testing.assert_close(y, module.base(x))
    module.active = True
    assert not torch.allclose(module(x), y)
    for pair in module.pairs().values():
        pair.B.data.zero_()
    torch.testing.assert_close(module(x), y, atol=0, rtol=0)


def test_a_starts_kaiming_uniform_and_b_at_zero() -> None:
    pair = Pair((("o_proj", 8),), 64, 1.0, like=torch.empty(8, 256))
    pair.reset(torch.Generator().manual_seed(1))
    bound = 256**-0.5  # Kaiming-uniform with a = sqrt 5 is +-1/sqrt(in)
    assert pair.A.abs().max() <= bound
    # 16384 draws: their standard deviation is within 2 % of the uniform's
    assert pair.A.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not pair.B.any()


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize(
    "groups",
    [
        {"gate_proj": ["gate_proj"], "up_proj": ["up_proj"], "down_proj": ["down_proj"]},
        {"up_proj": ["up_proj"]},
        {SHARED: ["gate_proj", "up_proj"]},
    ],
)
def test_adapted_experts_answer_as_experts_with_the_updates_in_their_weights(
    groups: dict[str, list[str]], active: bool
) -> None:
    torch.manual_seed(0)
    held, merged = Experts(4, 5, 6), Experts(4, 5, 6)
    for param in held.parameters():
        nn.init.normal_(param).requires_grad_(False)
    whole, factors = {}, []
    for name, rows in (("gate_up", 6), ("down", 5)):
        base = getattr(held, name)
        whole[name] = base.matrices().data.detach()
        parts = {key: [(p, rows) for p in named if p in dict(base.parts)] for key, named in groups.items()}
        pairs = {key: Pair(tuple(of), 3, 1.5, base.weight, experts=4) for key, of in parts.items() if of}
        factors += [nn.init.normal_(t) for pair in pairs.values() for t in (pair.A, pair.B)]
        if pairs:
            setattr(held, name, LoRAExperts(base, base.parts, pairs))
            getattr(held, name).active = active
        starts = {part: k * rows for k, (part, _) in enumerate(base.parts)}
        for pair in pairs.values() if active else ():
            for expert, part, A, B, _ in pair.updates(pair.A, pair.B):
                put = torch.zeros_like(whole[name])
                put[expert, starts[part] : starts[part] + rows] = 1.0
                spread = torch.zeros(*whole[name].shape[1:]).index_copy(
                    0, torch.arange(starts[part], starts[part] + rows), pair.scale * B @ A
                )
                whole[name] = whole[name] + put * spread
    x, weights = torch.randn(9, 5, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    order = by_expert(torch.rand(9, 4).topk(2).indices, 4)
    got = held(x, order, weights)
    want = functional_call(merged, {f"{k}.weight": w.flatten(0, 1) for k, w in whole.items()}, (x, order, weights))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    inputs, upstream = [x, weights, *(factors if active else [])], torch.randn_like(got)
    grads = [torch.autograd.grad(y, inputs, upstream) for y in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-3, rtol=1e-4)
