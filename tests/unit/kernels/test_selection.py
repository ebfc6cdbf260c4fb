"""One table says which kernel runs and why; a key overrules it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from erniekit.kernels import flash4, fp8_cards, grouped_gemm, quack_gemm, selection
from erniekit.kernels.expert_mlp import in_triton
from erniekit.kernels.selection import (
    OPERATIONS,
    AttentionFacts,
    ExpertFacts,
    Fp8Facts,
    GateUpFacts,
    PagedFacts,
    ProductFacts,
    chosen,
    force,
    select,
)

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selection, "why_no_triton", lambda: None)
    force({})  # forgets what was chosen so far
    yield
    force({})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper card with every library, as far as choices go."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(fp8_cards, "why_not", lambda *facts: None)
    monkeypatch.setattr(flash4, "why_not", lambda *facts: None)
    monkeypatch.setattr(quack_gemm, "why_not", lambda *facts: None)
    return monkeypatch


def everything(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, str]:
    attention, product = AttentionFacts(device, 8, 128), ProductFacts(device, dtype)
    facts = {
        "attention": attention, "packed attention": attention, "feed-forward": GateUpFacts(device, 1024, 6144, True),
        "experts": ExpertFacts(device, dtype, 2560, 1536, (32,)), "grouped products": product, "head": product,
        "experts' products with updates": ExpertFacts(device, dtype, 1536, 2560, (32,)),
        "fp8 products": Fp8Facts(device, 2560, 1536),
        "experts' fp8 products": Fp8Facts(device, 2560, 1536, experts=True),
        "paged attention": PagedFacts(device, dtype, 128),
        "experts of few tokens": ExpertFacts(device, dtype, 2560, 1536),
    }  # fmt: skip
    return {operation: chosen(operation, facts[operation]) for operation in OPERATIONS}


def test_a_cpu_has_the_definitions_and_a_hopper_card_the_fastest(hopper: pytest.MonkeyPatch) -> None:
    plain = [*OPERATIONS.values()]
    assert list(everything(CPU).values()) == [names[-1].name for names in plain]
    assert list(everything(CARD).values()) == [names[0].name for names in plain]


def test_each_choice_says_why_not_the_ones_before_it(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(flash4, "why_not", lambda *facts: "flash-attn-4 is not installed")
    hopper.setattr(selection.cudnn_packed, "library", lambda: None)
    found = select("packed attention", AttentionFacts(CARD, 8, 128))
    assert found.implementation == "flash"
    assert found.reason == "flash4: flash-attn-4 is not installed; cudnn: nvidia-cudnn-frontend is not installed"
    assert select("experts", ExpertFacts(CARD, torch.bfloat16, 64, 32)).reason == "the fastest"


def test_ranks_that_share_a_sequence_have_the_packed_kernels_of_one_rank(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(selection.cudnn_packed, "library", lambda: object())
    listed = AttentionFacts(CARD, 8, 128, listed=True)
    assert select("packed attention", listed) == ("packed attention", "flash4", "the fastest")
    assert chosen("packed attention", replace(listed, same_bits=True)) == "flash"
    assert chosen("packed attention", replace(listed, device=CPU)) == "sdpa"
    hopper.setattr(flash4, "why_not", lambda *facts: "for Hopper cards")
    force({})
    assert select("packed attention", listed) == ("packed attention", "cudnn", "flash4: for Hopper cards")
    rows = select("attention", listed)
    assert rows.implementation == "sdpa"
    assert rows.reason.count("queries and keys of different lengths have bounds: packed attention") == 2


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ExpertFacts(CARD, torch.float32, 64, 32), "for bf16, not float32"),
        (ExpertFacts(CARD, torch.bfloat16, 64, 36), "widths 64 and 36 are not multiples of 8"),
        (ExpertFacts(CARD, torch.bfloat16, 64, 32, (8, 129)), "adapters of rank 129 are above 128"),
        (ExpertFacts(CPU, torch.bfloat16, 64, 32), "not on cpu"),
    ],
)
def test_experts_take_plain_steps_where_no_kernel_fits(facts: ExpertFacts, why: str) -> None:
    found = select("experts", facts)
    assert (found.implementation, found.reason) == ("plain", f"triton: {why}")


def test_paged_attention_gathers_heads_that_no_tile_takes(hopper: pytest.MonkeyPatch) -> None:
    found = select("paged attention", PagedFacts(CARD, torch.bfloat16, 80))
    assert found.implementation == "gathered"
    assert found.reason == "triton: for heads of 16, 32, 64, 128, 256 channels, not 80"


def test_a_forced_kernel_is_the_one_that_runs(hopper: pytest.MonkeyPatch) -> None:
    force({"experts": "plain", "packed attention": "flash"})
    assert select("experts", ExpertFacts(CARD, torch.bfloat16, 64, 32)) == ("experts", "plain", "forced by kernels")
    assert chosen("packed attention", AttentionFacts(CARD, 8, 128)) == "flash"
    assert chosen("attention", AttentionFacts(CARD, 8, 128)) == "flash4", "others stay as they were"


def test_the_kernels_themselves_ask_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, ends = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    want = grouped_gemm.product_reference(rows, weight, ends)
    monkeypatch.setattr(grouped_gemm, "product_reference", lambda *given: want + 1)
    assert torch.equal(grouped_gemm.grouped_product(rows, weight, ends), want + 1)
    force({"experts": "triton"})
    with pytest.raises(ValueError, match="experts cannot be forced here: triton: not on cpu"):
        in_triton(torch.zeros(4, 8), 4, 8, [None])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"expert": "plain"}, "no operation 'expert': one of attention"),
        ({"experts": "fast"}, "no implementation 'fast' of experts: one of triton, plain"),
    ],
)
def test_what_is_not_in_the_table_cannot_be_forced(words: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        force(words)
