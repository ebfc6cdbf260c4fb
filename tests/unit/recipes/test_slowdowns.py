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
from erniekit.parallel.layout import Layout
from erniekit.recipes.slowdowns import PACKED, Slowdown, slowdowns
from erniekit.recipes.speed_decisions import for_device, for_lengths

SMALL = DecoderConfig("ernie_dense", 103424, 1024, 3072, 18, 16, 2, 128, 1e-5, 5e5, "pairs", True, 131072)
FLASH = [Choice("attention", "flash4", "the fastest"), Choice("packed attention", "flash4", "the fastest")]


class Rows:
    """4 rows of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.report = SimpleNamespace(tokens=4 * tokens)

    def __len__(self) -> int:
        return 4


def keys(*words: str, **given: Any) -> list[str]:
    return [slowdown.key for slowdown in found(*words, **given)]


def found(
    *words: str,
    rows: int = 6000,
    kernels: list[Choice] = FLASH,
    card: bool = True,
    epochs: int = 1,
    model: DecoderConfig = SMALL,
) -> list[Slowdown]:
    """epochs: that a run of 100 steps is."""
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    cfg = load(["model_name_or_path=x", "train_dataset_path=y", "max_seq_len=8192", "compute_type=bf16", *words])
    device = (CudaDevice if card else CpuDevice)("H200", "cuda", 139 * 2**30, {torch.bfloat16: 989.4e12})
    world: Any = SimpleNamespace(size=1, layout=Layout())
    cfg = for_lengths(for_device(cfg, device, world, model), device, world, model, rows, 100)
    size = cfg.train.per_device_train_batch_size * cfg.data.max_seq_len
    folder = SimpleNamespace(config=model)
    plan: Any = SimpleNamespace(config=cfg, device=device, world=world, folder=folder, full_size=size)
    data: Any = SimpleNamespace(
        sources=[Rows(rows)], is_streamed=cfg.data.streaming, filled=1.0, lengths=(rows,) * cfg.data.joins_rows,
        usual_size=rows, max_steps=100, packs_per_step=4, packs_per_epoch=400 // epochs,
    )  # fmt: skip
    return list(slowdowns(plan, data, kernels))


@pytest.mark.parametrize(
    "words", [["packing=True"], ["packing=False"], ["packing=False", "stage=DPO"], ["compile=False", "cuda_graph=True"]]
)
def test_a_run_as_it_is_by_default_or_replayed_is_not_slowdowns(words: list[str]) -> None:
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
        (["recompute=True", "recompute_granularity=full"], "recompute_granularity: auto"),
        (["offload_optim=True"], "offload_optim: False, where the device has room for them"),
        (["cuda_graph=False", "max_seq_len=2048"], "cuda_graph: True"),
        (["packing=False", "cuda_graph=False", "max_seq_len=2048"], "cuda_graph: True"),
        (["update_in_backward=True", "grad_clip=tensor", "max_seq_len=2048"], "update_in_backward: False"),
        (["packing=False", "streaming=True", "max_steps=100"], "streaming: False"),
        (["packing=False", "stage=RM", "compile=True"], PACKED),
        (["packing=False", "compile=False"], "compile: True"),
        (["packing=False", "compute_type=fp32"], "compute_type: bf16"),
    ],
)
def test_each_slowdown_names_the_key_that_removes_it(words: list[str], want: str) -> None:
    assert keys(*words) == [want]


@pytest.mark.parametrize(
    ("words", "what"),
    [([], "no CUDA graphs"), (["cuda_graph=True"], "filled up to max_seq_len"), (["compile=True"], "filled up")],
)
def test_what_rows_of_many_lengths_cost_depends_on_how_layers_run(words: list[str], what: str) -> None:
    (slowdown,) = found("packing=False", "length_buckets=off", *words)
    assert what in slowdown.what


def test_layers_that_auto_computes_again_are_no_slowdown_and_neither_are_launches_that_do_not_show() -> None:
    assert keys("recompute=True", "recompute_granularity=auto", "memory_limit=3") == []
    assert keys("cuda_graph=False", "max_seq_len=65536", rows=65536) == []


@pytest.mark.parametrize(
    ("words", "epochs", "want"),
    [
        (["stage=DPO"], 1, []),
        (["stage=DPO"], 3, ["reference_logps: cached"]),
        (["stage=KTO"], 3, ["reference_logps: cached"]),
        (["stage=DPO", "reference_logps=cached"], 3, []),
        (["stage=DPO", "loss_type=simpo"], 3, []),
        (["stage=SFT"], 3, []),
    ],
)
def test_a_reference_that_answers_the_same_rows_again_is_named(words: list[str], epochs: int, want: list[str]) -> None:
    assert keys(*words, epochs=epochs) == want


def test_kernels_that_are_forced_or_not_installed_are_named_with_what_changes_that() -> None:
    forced = Choice("experts", "plain", "forced by kernels")
    first = Choice("head", "quack", "forced by kernels")
    assert keys(kernels=[*FLASH, forced, first]) == ["kernels without experts=plain"]
    absent = "flash4: flash-attn-4 is not installed"
    slower = [Choice("attention", "rows", absent), Choice("packed attention", "cudnn", absent)]
    assert keys(kernels=slower) == ['pip install "erniekit-torch[flash4]"']
    other_card = "flash4: for Hopper cards; cudnn: nvidia-cudnn-frontend is not installed"
    assert keys(kernels=[FLASH[0], Choice("packed attention", "flash", other_card)]) == [
        'pip install "erniekit-torch[cudnn]"'
    ]


def test_short_rows_alone_in_long_sequences_and_a_missing_kernel_are_named() -> None:
    assert keys("packing=False", rows=900) == ["packing: True (other samples then share a step)"]
    without = [replaced._replace(implementation="sdpa") for replaced in FLASH]
    (found,) = keys(kernels=without)
    assert "flash4" in found


def test_a_cpu_is_not_told_what_a_card_would_do() -> None:
    assert keys("compute_type=fp32", "packing=False", card=False) == []
