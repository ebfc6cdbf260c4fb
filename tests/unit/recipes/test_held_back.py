"""What the doctor names as holding a run back, each with the key that would change it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.config import load
from erniekit.devices.cpu import CpuDevice
from erniekit.devices.cuda import CudaDevice
from erniekit.kernels.selection import Choice
from erniekit.models.config import DecoderConfig
from erniekit.parallel.mesh import Layout
from erniekit.recipes.held_back import Brake, brakes
from erniekit.recipes.speed_decisions import for_device, for_lengths

SMALL = DecoderConfig("ernie_dense", 103424, 1024, 3072, 18, 16, 2, 128, 1e-5, 5e5, "pairs", True, 131072)
FLASH = [Choice("attention", "flash4", "the fastest"), Choice("packed attention", "flash4", "the fastest")]


class Rows:
    """4 rows of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.report = SimpleNamespace(tokens=4 * tokens)

    def __len__(self) -> int:
        return 4


def keys(*words: str, rows: int = 6000, kernels: list[Choice] = FLASH, card: bool = True) -> list[str]:
    return [brake.key for brake in found(*words, rows=rows, kernels=kernels, card=card)]


def found(*words: str, rows: int = 6000, kernels: list[Choice] = FLASH, card: bool = True) -> list[Brake]:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    cfg = load(["model_name_or_path=x", "train_dataset_path=y", "max_seq_len=8192", "compute_type=bf16", *words])
    device = (CudaDevice if card else CpuDevice)("H200", "cuda", 139 * 2**30, {torch.bfloat16: 989.4e12})
    world: Any = SimpleNamespace(size=1, layout=Layout())
    cfg = for_lengths(for_device(cfg, device, world, SMALL), device, world, SMALL, rows, 100)
    plan: Any = SimpleNamespace(config=cfg, device=device, world=world, folder=SimpleNamespace(config=SMALL))
    data: Any = SimpleNamespace(sources=[Rows(rows)])
    return list(brakes(plan, data, kernels))


@pytest.mark.parametrize(
    "words", [["packing=True"], ["packing=False"], ["packing=False", "stage=DPO"], ["compile=False", "cuda_graph=True"]]
)
def test_a_run_as_it_is_by_default_or_replayed_is_not_held_back(words: list[str]) -> None:
    assert keys(*words) == []


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["packing=False", "length_buckets=off"], "length_buckets: auto"),
        (["compute_type=fp32"], "compute_type: bf16"),
        (["compile=False"], "compile: True"),
        (["attention=reference"], "attention: auto"),
        (["recompute=True"], "recompute_granularity: auto"),
        (["deterministic=True"], "deterministic: False"),
        (["packing=False", "compat=erniekit"], "packing: True"),
    ],
)
def test_each_brake_names_the_key_that_releases_it(words: list[str], want: str) -> None:
    assert keys(*words) == [want]


@pytest.mark.parametrize(
    ("words", "what"),
    [([], "no CUDA graphs"), (["cuda_graph=True"], "filled up to max_seq_len"), (["compile=True"], "filled up")],
)
def test_what_rows_of_many_lengths_cost_depends_on_how_layers_run(words: list[str], what: str) -> None:
    (brake,) = found("packing=False", "length_buckets=off", *words)
    assert what in brake.what


def test_short_rows_alone_in_long_sequences_and_a_missing_kernel_are_named() -> None:
    assert keys("packing=False", rows=900) == ["packing: True (other samples then share a step)"]
    without = [replaced._replace(implementation="sdpa") for replaced in FLASH]
    (found,) = keys(kernels=without)
    assert "flash4" in found


def test_a_cpu_is_not_told_what_a_card_would_do() -> None:
    assert keys("compute_type=fp32", "packing=False", card=False) == []
