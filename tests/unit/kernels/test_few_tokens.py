"""A router and its experts over few tokens: a server's kernels as the definitions, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from erniekit.kernels import few_tokens
from erniekit.kernels.expert_mlp import expert_mlp
from erniekit.kernels.moe_permute import by_expert
from erniekit.kernels.stored import PLAIN, Stored
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.router import Router
from support.for_hopper import run_for_hopper
from support.tiny_config import with_experts

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import few_tokens as kernels


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter, and are chosen."""
    monkeypatch.setattr("erniekit.kernels.few_tokens.runs_triton", lambda tensor: True)
    monkeypatch.setattr("erniekit.kernels.few_tokens.chosen", lambda operation, facts: "triton")


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 2, 4), (5, 6, 64), (40, 3, 7), (9, 1, 8)])
def test_rows_are_sorted_as_by_the_definition(tokens: int, choices: int, experts: int) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, experts + 1, (tokens, choices))  # `experts` itself: a choice of no expert
    for mine, theirs in zip(kernels.order(ids, experts), by_expert(ids, experts), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_all_rows_of_one_expert_stay_in_their_order() -> None:
    ids = torch.full((300, 1), 2)
    for mine, theirs in zip(kernels.order(ids, 255), by_expert(ids, 255), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("width", [64, 96, 1000])
def test_logits_are_fp32_products(width: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, width).bfloat16(), torch.randn(10, width)
    torch.testing.assert_close(kernels.logits(x, weight), x.float() @ weight.t(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_and_weighed_as_by_the_router(biased: bool) -> None:
    torch.manual_seed(2)
    config = small(biased)
    router = Router(config)
    torch.nn.init.normal_(router.weight)
    if router.bias is not None:
        torch.nn.init.normal_(router.bias, std=0.3)
    x = torch.randn(11, config.hidden_size).bfloat16()
    logits = torch.randn(11, router.experts)
    expected = router.choose(x, logits)
    found = kernels.choose(logits, router.bias, router.choices, router.norm_min, x.dtype)
    assert torch.equal(found[1], expected.ids)
    torch.testing.assert_close(found[0], expected.probs)
    torch.testing.assert_close(found[2], expected.weights, atol=2**-8, rtol=0)  # the interpreter cuts, a card rounds


def test_logits_that_are_no_numbers_still_name_experts() -> None:
    found = kernels.choose(torch.full((2, 6), float("nan")), None, 3, 1e-12, torch.float32)
    assert ((found[1] >= 0) & (found[1] < 6)).all()


def test_no_expert_is_chosen_twice_where_a_bias_forbids_more_than_are_left() -> None:
    bias = torch.tensor([0.3, float("-inf"), 0.1, float("-inf"), float("-inf")])
    torch.manual_seed(7)
    logits = torch.randn(8, 5)
    for choices in (2, 3, 5):
        _, ids, weights = kernels.choose(logits, bias, choices, 1e-12, torch.float32)
        assert all(len(set(row)) == choices for row in ids.tolist())
        assert all({0, 2} <= set(row) for row in ids.tolist()), "the allowed ones first"
        probs = logits.softmax(-1).gather(1, ids)
        torch.testing.assert_close(weights, probs / probs.sum(-1, keepdim=True))


@pytest.mark.parametrize("each", [16, 32])
@pytest.mark.parametrize("tokens", [1, 12])
def test_products_are_those_of_the_expert_op(tokens: int, each: int) -> None:
    """In fp32, so that only the order of sums differs; one expert has no row, one has more than a tile."""
    torch.manual_seed(3)
    H, W, E, K = 64, 96, 5, 2
    ids = torch.stack((torch.zeros(tokens, dtype=torch.int64), torch.randint(1, E - 1, (tokens,))), 1)
    order, weights = by_expert(ids, E), torch.rand(tokens, K)
    x, gate_up, down = torch.randn(tokens, H), torch.randn(E, 2 * W, H) / 8, torch.randn(E, H, W) / 8
    rows = kernels.products(x, order.row_of, order.ends, weights, gate_up, down, each)
    mine = rows[order.place_of].view(tokens, K, H).sum(1)
    theirs = expert_mlp(x, order, weights, Stored(gate_up), Stored(down))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_card_with_little_shared_memory_has_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, want in (
        (227 << 10, kernels.PRODUCT),
        (99 << 10, kernels.PRODUCT),
        (64 << 10, kernels.SMALL),
        (None, kernels.SMALL),
    ):
        properties = SimpleNamespace(**({} if size is None else {"shared_memory_per_block_optin": size}))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        kernels.tile_for.cache_clear()
        assert kernels.tile_for(torch.device("cuda", 0)) == want
    kernels.tile_for.cache_clear()


def small(biased: bool = True) -> DecoderConfig:
    moe = MoEShape(experts=6, choices=2, width=32, shared_width=32, start=1, end=2, bias=biased)
    return with_experts(moe, hidden_size=64)


@pytest.mark.usefixtures("as_on_a_card")
def test_a_block_computes_the_same_with_them_and_only_where_they_are_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    block = MoE(small(), 1).requires_grad_(False)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 7, 64)  # the interpreter has no products of bf16
    launched: list[str] = []
    for name in ("logits", "choose", "order", "products"):
        monkeypatch.setattr(kernels, name, _noted(launched, name, getattr(kernels, name)))
    without = block(x, None)
    assert not launched
    with few_tokens.enabled():
        mine = block(x, None)
    assert launched == ["logits", "choose", "order", "products"]
    torch.testing.assert_close(mine, without, atol=1e-5, rtol=1e-5)
    assert torch.equal(block(x, None), without), "and the definition is back"


def _noted(launched: list[str], name: str, function):  # type: ignore[no-untyped-def]
    def call(*given):  # type: ignore[no-untyped-def]
        launched.append(name)
        return function(*given)

    return call


@pytest.mark.usefixtures("as_on_a_card")
def test_many_rows_other_kinds_and_other_formats_take_the_usual_way() -> None:
    x, weight = torch.zeros(4, 64).bfloat16(), Stored(torch.zeros(4, 64, 64).bfloat16())
    with few_tokens.enabled():
        assert few_tokens.multiplies(x, 8, weight, weight)
        assert not few_tokens.multiplies(x, few_tokens.ROWS + 1, weight, weight)
        assert not few_tokens.multiplies(x, 0, weight, weight)
        assert not few_tokens.multiplies(x, 8, weight, weight._replace(kind="fp8"))
        assert not few_tokens.multiplies(x, 8, weight, Stored(weight.data.float()))
        assert not few_tokens.routes(x.double(), torch.zeros(4, 64), 2)
        assert not few_tokens.sorts(torch.zeros(2000, 1, dtype=torch.int64), 4)
    assert weight.kind == PLAIN


COMPILE = """
from erniekit.kernels.triton import few_tokens as f

kinds = dict(E="i32", R="i32", least="fp32", row_of="*i64", place_of="*i64", ids="*i64", ends="*i32", probs="*fp32",
             logits="*fp32", bias="*fp32", weight="*fp32")
def make(kernel, fixed, warps, **more):
    given = {name: {**kinds, **more}.get(name, "*bf16") for name in kernel.arg_names}
    return built(kernel, given, fixed, warps)["ptx"]

make(f._logits, dict(H=2560, BE=f.EXPERTS_A_PROGRAM, BK=4096), 4, out="*fp32")
make(f._choose, dict(K=6, BK=8, BE=64, BIASED=True), 1)
make(f._order, dict(BR=128, BE=128), 8)
for each in (16, 32):
    a = make(f._gate_up, dict(K=6, H=2560, W=1536, BM=each, BN=64, BK=128, BE=64, STAGES=3), 4)
    b = make(f._down, dict(H=2560, W=1536, BM=each, BN=64, BK=128, BE=64, STAGES=3), 4)
    print(a.count("cp.async"), b.count("cp.async"))
"""


def test_the_kernels_compile_for_a_hopper_card_and_load_ahead(tmp_path: Path) -> None:
    assert all(int(count) > 8 for count in run_for_hopper(COMPILE, tmp_path).split())
