"""One table says which kernel runs and why; a key overrules it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from erniekit import capabilities
from erniekit.kernels import attention as attention_file
from erniekit.kernels import flash4, fp8_cards, grouped_gemm, quack_gemm, selection
from erniekit.kernels.attention import attention
from erniekit.kernels.expert_mlp import in_triton
from erniekit.kernels.selection import (
    OPERATIONS,
    AttentionFacts,
    ExpertFacts,
    Fp8Facts,
    FrameFacts,
    GateUpFacts,
    HeadFacts,
    PagedFacts,
    ProductFacts,
    chosen,
    documents_apart,
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
        "experts": ExpertFacts(device, dtype, 2560, 1536, (32,)), "grouped products": product,
        "head": HeadFacts(device, dtype, 32000), "frame attention": FrameFacts(device, dtype, 64),
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


def test_updates_of_high_ranks_are_added_apart_from_the_product(hopper: pytest.MonkeyPatch) -> None:
    facts = ExpertFacts(CARD, torch.bfloat16, 1536, 2560, (8, 64))
    assert chosen("experts' products with updates", facts) == "triton"
    found = select("experts' products with updates", replace(facts, ranks=(8, 65)))
    assert (found.implementation, found.reason) == ("apart", "triton: adapters of rank 65 are above 64")


def test_a_head_is_the_fast_one_by_the_rows_of_this_rank(hopper: pytest.MonkeyPatch) -> None:
    facts = HeadFacts(CARD, torch.bfloat16, 16384)
    assert chosen("head", facts) == "quack"
    assert select("head", replace(facts, rows=16000)).reason == "quack: fewer than 16384 columns"
    assert select("head", replace(facts, bias=True)).reason == "quack: a bias is added"


PACKS = AttentionFacts(CARD, 8, 128, apart=True)


@pytest.mark.parametrize(
    ("facts", "lacks", "found"),
    [
        (PACKS, {}, "flash"),
        (replace(PACKS, dtype=torch.float32), {}, "sdpa"),
        (replace(PACKS, head_dim=100), {}, "sdpa"),
        (PACKS, {"varlen": "an older card"}, "masked"),
        (replace(PACKS, device=torch.device("xpu")), {}, "masked"),
        (replace(PACKS, device=CPU), {}, "sdpa"),
    ],
)
def test_documents_with_positions_in_them_already_have_kernels_that_take_those(
    hopper: pytest.MonkeyPatch, facts: AttentionFacts, lacks: dict[str, str], found: str
) -> None:
    capabilities.set_lacks(lacks)
    try:
        assert documents_apart(facts) == chosen("packed attention", facts) == found
    finally:
        capabilities.set_lacks({})


def test_a_forced_attention_is_that_of_documents_with_positions_too_where_it_takes_them(
    hopper: pytest.MonkeyPatch,
) -> None:
    force({"packed attention": "sdpa"})
    assert documents_apart(PACKS) == "sdpa"
    force({"packed attention": "flash4"})
    assert documents_apart(PACKS) == "flash", "that one puts positions in itself"


def test_attention_asks_the_table_which_way_documents_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    q, bounds = torch.randn(1, 6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    monkeypatch.setattr(attention_file, "_with_a_mask", lambda *given: "masked")
    assert torch.equal(attention(q, q, q, bounds, 4), attention(q, q, q, bounds, 4, "sdpa"))
    asked = []
    monkeypatch.setattr(attention_file, "documents_apart", lambda facts: asked.append(facts) or "masked")
    assert attention(q, q[:, :, :1], q[:, :, :1], bounds, 4) == "masked"
    assert asked == [AttentionFacts(CPU, 2, 8, dtype=torch.float32, apart=True)]


def test_a_compiled_layer_can_ask_which_way_documents_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        found = [documents_apart(AttentionFacts(d, 1, 8, dtype=x.dtype, apart=True)) for d in (x.device, CARD)]
        return x + len(" ".join(found))

    monkeypatch.setattr(selection, "why_no_triton", lambda: torch._dynamo.graph_break())
    x = torch.zeros(3, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), x + len("sdpa flash"))


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


def test_the_page_on_kernels_names_every_operation_and_implementation(root: Path) -> None:
    rows = [line for line in (root / "docs" / "kernels.md").read_text().splitlines() if line.startswith("| `")]
    for operation, implementations in OPERATIONS.items():
        (row,) = (line for line in rows if line.startswith(f"| `{operation}`"))
        assert [each.name for each in implementations if f"`{each.name}`" not in row.split(" | ")[1]] == [], operation
