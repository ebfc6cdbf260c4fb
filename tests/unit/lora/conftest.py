"""Small models and adapters with real numbers in them, for every LoRA test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.inject import inject, lora_linears
from erniekit.lora.settings import LoRASettings

Build = Callable[..., nn.Module]


@pytest.fixture
def ernie(paddle: Path) -> nn.Module:
    return ModelFolder(paddle / "dense_old").build()


@pytest.fixture
def llama(paddle: Path) -> nn.Module:
    """Its Paddle form keeps qkv grouped by kv head, gate and up fused."""
    return ModelFolder(paddle / "llama_fused").build()


@pytest.fixture
def moe(paddle: Path) -> nn.Module:
    """A dense first layer, then three with two shared and eight routed experts."""
    return ModelFolder(paddle / "moe_old").build()


@pytest.fixture
def trained() -> Build:
    """inject, then B away from zero, as after some steps."""

    def make(model: nn.Module, settings: LoRASettings | None = None, seed: int = 3) -> nn.Module:
        inject(model, settings or LoRASettings.resolve(rank=3), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, module in lora_linears(model):
                for pair in module.pairs().values():
                    pair.B.normal_(0, 0.1, generator=generator)
        return model

    return make
