"""The norm of all gradients: in fp64, without a copy of them in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from erniekit.kernels import wide_squares
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.parallel.gradients import GradientSync
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import sharding_of

CONFIG = DecoderConfig(
    family="llama", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="halves", max_positions=64, tie_word_embeddings=False,
    vocab_size=4099, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
)  # fmt: skip


class Widest(TorchDispatchMode):
    """The most bytes that any one operation made in fp64."""

    seen = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float64:
            self.seen = max(self.seen, out.untyped_storage().nbytes())
        return out


@pytest.fixture
def sync() -> GradientSync:
    spec = MODELS.get("llama")
    with torch.device("meta"):
        model = spec.build(CONFIG)
    sharding = sharding_of(model, spec.plan, Layout())
    return GradientSync(list(sharding.names()), sharding, World(Layout(), 0))


@pytest.fixture
def grads(sync: GradientSync) -> dict[str, torch.Tensor]:
    """From 1e-12 to 1e3: squares that a sum in fp32 would lose."""
    torch.manual_seed(0)
    return {
        name: torch.randn(sync.sharding.shape(name)) * 10.0 ** torch.randint(-12, 4, ()).item() for name in sync.names
    }


def test_a_norm_needs_no_copy_of_a_gradient_in_fp64(
    sync: GradientSync, grads: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide_squares, "WIDE", 4096)
    largest = max(grad.numel() for grad in grads.values())
    assert largest > 16 * 4096
    with Widest() as memory:
        got = sync.norm(grads)
    assert 0 < memory.seen <= 8 * 4096
    want = sum(grad.double().pow(2).sum() for grad in grads.values()) ** 0.5
    assert got == want.float()  # type: ignore[union-attr]


def test_a_list_without_one_of_the_gradients_is_not_reduced(sync: GradientSync, grads: dict[str, torch.Tensor]) -> None:
    """Other ranks would add theirs to another one's."""
    sync.replica_group = object()  # type: ignore[assignment]  # the list is made before it is asked
    del grads["head.weight"]
    with pytest.raises(KeyError, match=r"head\.weight"):
        sync.reduce(grads)
