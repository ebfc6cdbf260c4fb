"""Two banks of experts: each has rows for the tokens of its own modality, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from erniekit.data.types import IMAGE, TEXT, Batch, More
from erniekit.kernels.expert_mlp import expert_mlp
from erniekit.kernels.moe_permute import Order
from erniekit.models import MODELS
from erniekit.models.config import BankShape, DecoderConfig, MoEShape, VisionShape
from erniekit.models.layers import experts

CHOICES, WIDTH, LENGTH = 2, 6, 24
SHAPE = DecoderConfig(
    family="ernie4_5_vl_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=64,
    tie_word_embeddings=True, vocab_size=61, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8, mrope=(1, 1, 2),
    moe=MoEShape(4, CHOICES, WIDTH, 12, start=1, end=1, vision=BankShape(4, 4)),
    vision=VisionShape(depth=1, width=8, heads=2, mlp_width=8, patch=2),
)  # fmt: skip


def replace_vision(config: DecoderConfig, **sizes: Any) -> DecoderConfig:
    return replace(config, vision=VisionShape(**sizes))


def block() -> Any:
    torch.manual_seed(3)
    model: Any = MODELS.get("ernie4_5_vl_moe").build(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def kinds(seen: int) -> torch.Tensor:
    made = torch.full((1, LENGTH), TEXT, dtype=torch.uint8)
    made[0, 2 : 2 + seen] = IMAGE
    return made


def answer(model: Any, more: More) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, LENGTH * 16).view(1, LENGTH, 16).requires_grad_()
    y = model.layers[1].mlp(x, model.context(torch.arange(LENGTH)[None], more=more))
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("seen", [0, 7, LENGTH - 2])
def test_each_bank_has_rows_for_its_own_tokens_alone_and_answers_the_same(
    seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = block(), dict[str, int]()

    def look(x: torch.Tensor, order: Order, weights: torch.Tensor, gate_up: Any, *more: Any) -> torch.Tensor:
        rows["text" if gate_up.data.shape[1] == 2 * WIDTH else "vision"] = order.row_of.shape[0]
        return expert_mlp(x, order, weights, gate_up, *more)

    monkeypatch.setattr(experts, "expert_mlp", look)
    unknown = answer(model, More(modality=kinds(seen)))
    assert rows == {"text": CHOICES * LENGTH, "vision": CHOICES * LENGTH}
    known = answer(model, More(modality=kinds(seen), vision_tokens=seen))
    assert rows == {"text": CHOICES * (LENGTH - seen), "vision": CHOICES * seen}
    for got, wanted in zip(known, unknown):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_a_batch_counts_its_vision_tokens_in_host_memory() -> None:
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    batch = Batch(ids, ids, ids, torch.tensor([0, LENGTH]), LENGTH, 1, modality=kinds(5))
    assert batch.more().vision_tokens == 5
    moved = batch.to(torch.device("meta"))
    assert moved.modality is not None
    assert moved.modality.is_meta
    assert moved.more().vision_tokens == 5


@pytest.mark.full
@pytest.mark.parametrize("whole", [True, False], ids=["one graph", "weights gathered inside"])
def test_another_number_of_vision_tokens_is_no_other_program(whole: bool) -> None:
    """What compiles a layer sees lengths that may differ, also behind a hook that it cannot see into."""
    model, programs = block(), list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph.forward

    mlp = model.layers[1].mlp
    if not whole:
        for bank in mlp.banks():
            bank.experts.register_forward_pre_hook(torch._dynamo.disable(lambda module, given: None))
    layer = torch.compile(mlp.forward, fullgraph=whole, dynamic=False, backend=backend)
    x, counts = torch.linspace(-1, 1, LENGTH * 16).view(1, LENGTH, 16), []
    for seen in (7, 9, 4, 15, 20):
        ctx = model.context(torch.arange(LENGTH)[None], more=More(modality=kinds(seen), vision_tokens=seen))
        layer(x, ctx)
        counts.append(len(programs))
    assert counts[0] == counts[-1], counts
    torch.testing.assert_close(layer(x, ctx), model.layers[1].mlp(x, ctx._replace(lengths=None)))
