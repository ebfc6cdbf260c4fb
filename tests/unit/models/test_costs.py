"""What a model costs: weights against those of built models, FLOPs against torch's counter, bytes against numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from erniekit.data.collate import collate
from erniekit.data.types import IGNORE, Pack, Sample
from erniekit.kernels.expert_mlp import Update
from erniekit.kernels.grouped_gemm import product_reference
from erniekit.kernels.moe_permute import combine, gather, weights_of_rows
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.losses.causal import causal_loss
from erniekit.models import costs
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.models.costs import TokenCounts
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.parallel.recompute import apply_recompute

DENSE = DecoderConfig(
    family="ernie4_5", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True, max_positions=128,
)  # fmt: skip
SPARSE = replace(DENSE, family="ernie4_5_moe", moe=MoEShape(8, 2, 16, 32, start=1, end=2))
ALONE = replace(SPARSE, moe=MoEShape(8, 3, 16, 0, start=0, end=2))  # routed experts in every layer, none shared
UNTIED = replace(DENSE, tie_word_embeddings=False)
# ERNIE-4.5-21B-A3B
LARGE = DecoderConfig(
    family="ernie4_5_moe", vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_layers=28, num_heads=20,
    num_kv_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
    max_positions=131072, mtp_layers=1, moe=MoEShape(64, 6, 1536, 3072, start=1, end=27),
)  # fmt: skip
LENGTH, UNTRAINED = 24, 7
SEEN = TokenCounts(LENGTH, LENGTH - UNTRAINED, LENGTH**2)


# --- weights


@pytest.mark.parametrize(
    "c",
    [
        DENSE,
        UNTIED,
        SPARSE,
        ALONE,
        replace(SPARSE, mtp_layers=2),
        replace(SPARSE, moe=replace(SPARSE.moe, bias=False)),  # type: ignore[type-var]
        replace(DENSE, attention_bias=True, mlp_bias=True, head_bias=True, mtp_layers=1),
        replace(UNTIED, head_bias=True),
        replace(SPARSE, attention_bias=True, mlp_bias=True),
    ],
)
def test_weights_of_each_kind_are_those_a_built_model_has(c: DecoderConfig) -> None:
    with torch.device("meta"):
        model = Decoder(c)
    built: dict[str, int] = {}
    for name, param in model.named_parameters():
        built[kind_of(name)] = built.get(kind_of(name), 0) + param.numel()
    assert {kind: count for kind, count in costs.weights(c).items() if count} == built
    assert costs.parameters(c) == sum(built.values())


def kind_of(name: str) -> str:
    if name.startswith("mtp."):
        return "further"
    if name.endswith("bias"):
        return "biases"
    known = {"norm": "norms", ".attn.": "attention", ".router.": "router", ".experts.": "experts", ".shared.": "shared"}
    found = [kind for part, kind in known.items() if part in name]
    return found[0] if found else {"embed": "embedding", "head": "head", "layers": "mlp"}[name.split(".")[0]]


def test_the_21b_counts_its_weights_as_published() -> None:
    assert costs.parameters(LARGE) == 21_948_655_808
    assert costs.active_parameters(LARGE) == 3_352_150_208


@pytest.mark.parametrize("c", [DENSE, SPARSE, replace(ALONE, mtp_layers=1)])
def test_adapters_on_everything_are_counted_by_shape_as_they_are_by_name(c: DecoderConfig) -> None:
    model = adapted(c, 4)
    assert costs.adapters_met(c, 4) == costs.adapters_met_of(c, sizes(model)) > 0
    assert costs.adapters_met_of(c, sizes(Decoder(c))) == 0


def test_adapters_on_some_projections_are_counted_by_name() -> None:
    router = adapted(SPARSE, 4, ("q_proj", "gate"))
    assert costs.adapters_met_of(SPARSE, sizes(router)) == 3 * 4 * (32 + 64), "a router's update meets no token"
    experts = adapted(SPARSE, 4, (r".*\.experts\..*\.up_proj",))
    assert costs.adapters_met_of(SPARSE, sizes(experts)) == 2 * 2 * 4 * (32 + 16), "of eight experts two"


def adapted(c: DecoderConfig, rank: int, targets: tuple[str, ...] | None = None) -> Decoder:
    model = Decoder(c)
    init_weights(model, seed=2, std=0.3)
    inject(model, LoRASettings(rank=rank, targets=targets), seed=0)
    return model


def sizes(model: Decoder) -> list[tuple[str, int]]:
    return [(name, param.numel()) for name, param in model.named_parameters()]


# --- FLOPs, against torch's count of the products that really run


@pytest.fixture(autouse=True)
def experts_in_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counter looks into no op of ours."""

    def run(x, order, weights, gate_up, down, *updates):  # type: ignore[no-untyped-def]
        def times(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return product_reference(rows, weight.transpose(1, 2), order.ends)

        def low(rows: torch.Tensor, update: Update | None) -> torch.Tensor | float:
            return 0.0 if update is None else update.scale * times(times(rows, update.A), update.B)

        rows = gather(x, order, weights.shape[1])
        gate, up = times(rows, gate_up.data).chunk(2, dim=-1)
        act = F.silu(gate + low(rows, updates[0])) * (up + low(rows, updates[1]))
        answers = times(act, down.data) + low(act, updates[2])
        return combine(answers * weights_of_rows(weights, order), order, weights.shape[1])

    monkeypatch.setattr("erniekit.models.layers.experts.expert_mlp", run)


def counted(model: Decoder, recompute: str | None = None) -> int:
    """By torch, which looks into no op of ours: every module is watched, so that each runs as plain products. The
    attention is written out with its mask, over the whole square."""
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    for layer in model.layers:
        layer.attn.inner.backend = "reference"  # type: ignore[union-attr]
    if recompute is not None:
        apply_recompute(model, recompute)
    tokens, labels = torch.randint(0, 64, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, :UNTRAINED] = IGNORE
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=labels).backward()
    return int(counter.get_total_flops())


def square(c: DecoderConfig, products: int) -> float:
    """The half of the square that causal attention leaves out and the written mask does not."""
    return products * costs.attention_work(c, SEEN.sum_squares, c.num_layers)


@pytest.mark.parametrize("c", [DENSE, UNTIED, SPARSE, ALONE])
def test_flops_of_a_step_are_those_torch_counts(c: DecoderConfig) -> None:
    model = Decoder(c)
    init_weights(model, seed=2, std=0.3)
    assert costs.step_flops(c, SEEN) + square(c, 6) == counted(model)


@pytest.mark.parametrize("c", [DENSE, SPARSE])
def test_flops_of_a_forward_pass_are_those_torch_counts(c: DecoderConfig) -> None:
    model = Decoder(c)
    init_weights(model, seed=2, std=0.3)
    for layer in model.layers:
        layer.attn.inner.backend = "reference"  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, LENGTH, dtype=torch.long))
    everywhere = SEEN._replace(trained=LENGTH)  # without labels the head runs on every token
    assert costs.forward_flops(c, everywhere) + square(c, 2) == counter.get_total_flops()


@pytest.mark.parametrize("c", [DENSE, SPARSE])
def test_flops_of_lora_are_those_torch_counts_but_for_the_gradient_of_the_frozen_embedding(c: DecoderConfig) -> None:
    rank = 8  # experts' updates are padded to multiples of this
    told = costs.step_flops(c, SEEN, frozen_base=True, adapters=costs.adapters_met(c, rank)) + square(c, 6)
    first = costs.layer_products(c, c.sparse(0))[:3]
    to_embedding = 2 * LENGTH * sum(p.inputs * (p.outputs + rank) for p in first)
    assert told - to_embedding == counted(adapted(c, rank))


def test_flops_of_layers_that_predict_further_tokens_are_those_torch_counts() -> None:
    c = replace(DENSE, mtp_layers=2)
    ids = torch.arange(LENGTH + 1).numpy().astype("int32") % 64
    batch = collate([Pack((Sample(ids[:-1], ids[1:]),))], ahead=2)
    told, without = (costs.step_flops(c, TokenCounts(LENGTH, LENGTH, LENGTH**2), further=n) for n in (2, 0))
    model = Decoder(c)
    init_weights(model, seed=2, std=0.3)
    model.mtp_weight, model.records = 0.3, []
    for block in (*model.layers, *(ahead.block for ahead in model.mtp)):
        block.attn.inner.backend = "reference"  # type: ignore[union-attr]
    with FlopCounterMode(display=False) as counter:
        causal_loss(model, batch).backward()
    squares = 6 * costs.attention_work(c, LENGTH**2, c.num_layers + 2)
    past_the_end = 6 * (1 + 2) * c.vocab_size * c.hidden_size  # labels that a document's last tokens do not have
    assert told + squares - past_the_end == counter.get_total_flops()
    assert told > without


def test_a_frozen_weight_has_no_gradient_and_an_adapter_has() -> None:
    full, frozen = (costs.step_flops(DENSE, SEEN, frozen) for frozen in (False, True))
    products = costs.products_met(DENSE) * SEEN.tokens + 64 * 32 * SEEN.trained
    assert full - frozen == 2 * products
    assert costs.step_flops(DENSE, SEEN, True, adapters=100) - frozen == 6 * 100 * SEEN.tokens


def test_a_reference_that_runs_adds_a_forward_pass_without_adapters_or_further_layers() -> None:
    flops = partial(costs.step_flops, DENSE, SEEN, True, 100, 1)
    assert flops(True) - flops(False) == costs.forward_flops(DENSE, SEEN)


def test_flops_count_the_experts_a_token_meets_not_those_that_exist() -> None:
    assert LARGE.moe is not None
    more = replace(LARGE, moe=replace(LARGE.moe, experts=128))
    one = TokenCounts(1, 0, 0)
    assert costs.step_flops(more, one) - costs.step_flops(LARGE, one) == 6 * 27 * 64 * 2560, "the router's"
    norms_and_biases = (2 * 28 + 1) * 2560 + 27 * 64
    assert costs.token_flops(LARGE) == 6 * (3_352_150_208 - norms_and_biases)
    assert costs.token_flops(LARGE, frozen_base=True) * 6 == costs.token_flops(LARGE) * 4


def test_mfu_is_a_share_of_the_peak_of_all_ranks_and_unknown_without_a_peak() -> None:
    assert costs.mfu(8e12, seconds=2.0, peak=1e13, ranks=4) == 0.1
    assert costs.mfu(8e12, seconds=2.0, peak=None) is None


# --- bytes, as the decisions on memory count them


def test_bytes_of_states_and_of_generated_text() -> None:
    assert costs.optimizer_bytes("bf16") == 8
    assert costs.cache_bytes(LARGE, 2) == 28 * 2 * 4 * 128 * 2


def test_packed_frozen_weights_count_with_the_bits_of_their_kinds() -> None:
    found = costs.weights(LARGE)
    rest = 2 * (costs.parameters(LARGE) - found["experts"] - found["attention"] - found["mlp"])
    assert costs.weight_bytes(LARGE) == 2 * costs.parameters(LARGE)
    assert costs.weight_bytes(LARGE, "wint4/8") == rest + found["experts"] / 2 + found["attention"] + found["mlp"]
    assert costs.weight_bytes(LARGE, "wint4/8") / 2**30 == pytest.approx(11.91, abs=0.01)
    packed = sum(found[role] for role in ("experts", "attention", "mlp", "shared"))
    assert costs.weight_bytes(LARGE, "mxfp4") == 2 * (costs.parameters(LARGE) - packed) + packed * 4.25 / 8


def test_a_packed_weight_is_unpacked_into_memory_that_counts() -> None:
    assert costs.unpacking_bytes(LARGE) == 0
    assert costs.unpacking_bytes(LARGE, "wint4/8") == 2 * 64 * 3072 * 2560, "gate and up of the experts"
    assert costs.unpacking_bytes(DENSE, "wint4/8") > 0
