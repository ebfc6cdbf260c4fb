"""Two banks of experts: each has rows for the tokens of its own modality, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from erniekit.data.types import IMAGE, TEXT, Batch, More
from erniekit.kernels.moe_permute import Order
from erniekit.models import MODELS
from erniekit.models.config import BankShape, DecoderConfig, MoEShape, VisionShape
from erniekit.models.layers.modal import length_of

CHOICES, LENGTH = 2, 24
SHAPE = DecoderConfig(
    family="ernie4_5_vl_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=64,
    tie_word_embeddings=True, vocab_size=61, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8, mrope=(1, 1, 2),
    moe=MoEShape(4, CHOICES, 6, 12, start=1, end=1, vision=BankShape(4, 4)),
    vision=VisionShape(depth=1, width=8, heads=2, mlp_width=8, patch=2),
)  # fmt: skip


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
def test_each_bank_has_rows_for_its_own_tokens_alone_and_answers_the_same(seen: int) -> None:
    model, rows = block(), dict[str, int]()

    def look(name: str) -> Any:
        def hook(_: Any, given: tuple[Any, Order, Any]) -> None:
            rows[name] = given[1].row_of.shape[0]

        return hook

    for name in ("text", "vision"):
        getattr(model.layers[1].mlp, name).experts.register_forward_pre_hook(look(name))
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
def test_another_number_of_vision_tokens_is_no_other_program() -> None:
    """What compiles a layer sees a length that may differ; only the first of all may be a case of its own."""
    model, programs = block(), list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        programs.append(graph)
        return graph.forward

    layer = torch.compile(model.layers[1].mlp.forward, fullgraph=True, dynamic=False, backend=backend)
    x = torch.linspace(-1, 1, LENGTH * 16).view(1, LENGTH, 16)
    for seen in (7, 9, 4, 15, 20):
        ctx = model.context(torch.arange(LENGTH)[None], more=More(modality=kinds(seen), vision_tokens=seen))
        torch.testing.assert_close(layer(x, ctx), model.layers[1].mlp(x, ctx))
    assert len(programs) == 1
    for seen in (7, 9):
        layer(x, ctx._replace(seen=length_of(seen, x)))
    assert len(programs) == 2, "another dtype, and a length that may differ there too"
