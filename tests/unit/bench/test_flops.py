"""The model FLOPs of workloads, against the arithmetic done by hand and the count of the trainer's metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from erniekit.bench.data import PictureIds, make_steps
from erniekit.bench.flops import useful_flops
from erniekit.bench.workloads import WORKLOADS, Rows
from erniekit.config import RunConfig, load
from erniekit.data.types import Batch
from erniekit.devices.base import Device
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import adapters_met
from erniekit.train.metrics import LogHook, VisionTraining
from erniekit.train.step import StepResult


def config(name: str) -> DecoderConfig:
    raw = dict(WORKLOADS[name].model)
    read: DecoderConfig = MODELS.get(raw["model_type"]).read_config(raw, "hf", False, "")
    return read


def keys(*words: str) -> RunConfig:
    return load(["model_name_or_path=x", "train_dataset_path=y", *words], "train")


FULL, LORA = keys("fine_tuning=Full"), keys("fine_tuning=LoRA", "lora_rank=32")


def step(rows: Rows) -> Batch:
    return make_steps(rows, 100, 1, 0)[0].batch


def test_the_llama_shape_at_38k_tokens_is_66_percent_of_the_peak() -> None:
    flops = useful_flops(FULL, config("F1"), step(WORKLOADS["F1"].rows))
    layer = 4 * 5120**2 + 3 * 5120 * 13824
    by_hand = 6 * (8 * layer + 32000 * 5120) * 16384 + 6 * 8 * 5120 * 4 * 4096**2
    assert flops == pytest.approx(by_hand, rel=1e-4)  # the four places that train nothing
    assert flops / (16384 / 38e3) / 989.4e12 == pytest.approx(0.66, abs=0.005)


def test_a_token_meets_six_of_64_experts_and_a_frozen_weight_no_gradient() -> None:
    batch = step(Rows(1, 1024))
    c = config("C1-85")
    full, lora = useful_flops(FULL, c, batch), useful_flops(LORA, c, batch)
    attention, router, expert = 2560 * 128 * 2 * (20 + 4), 64 * 2560, 3 * 2560 * 1536
    layers = 28 * attention + 3 * 2560 * 12288 + 27 * (router + (6 + 2) * expert)
    weights = layers * 1024 + 103424 * 2560 * batch.num_label_tokens
    squares = 6 * 28 * 20 * 128 * 1024**2
    assert full == 6 * weights + squares
    assert lora == 4 * weights + 6 * 1024 * adapters_met(c, 32) + squares


@pytest.mark.parametrize(("words", "more"), [(("reference_logps=live",), 1 / 3), (("reference_logps=cached",), 0)])
def test_a_live_reference_is_a_third_more_in_full_training_and_a_cached_one_nothing(
    words: tuple[str, ...], more: float
) -> None:
    batch, c = step(Rows(1, 256)), config("A1")
    with_reference = useful_flops(keys("stage=DPO", "fine_tuning=Full", *words), c, batch)
    assert with_reference / useful_flops(FULL, c, batch) == pytest.approx(1 + more, abs=1e-12)


def test_masked_labels_cost_no_head() -> None:
    some, none = (step(Rows(1, 256, masked=m)) for m in (0.5, 0.0))
    c = config("A1")
    saved = useful_flops(FULL, c, none) - useful_flops(FULL, c, some)
    assert saved == 6 * c.vocab_size * c.hidden_size * (none.num_label_tokens - some.num_label_tokens)


@pytest.mark.parametrize(("name", "cfg"), [("A1", FULL), ("C1-85", LORA)])
def test_the_trainers_metrics_and_bench_tell_one_and_the_same_mfu(name: str, cfg: RunConfig) -> None:
    batch, c, logged = step(Rows(1, 512)), config(name), []

    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **_: None, advance=lambda step: None
    )
    trainer = SimpleNamespace(max_steps=1, state=SimpleNamespace(step=0, packs=0))
    device = Device("a card", "cpu", 0, {torch.bfloat16: 1e12})
    lora = cfg.lora.lora
    adapters = adapters_met(c, cfg.lora.lora_rank) if lora else 0
    hook = LogHook(trackers, device, c, torch.bfloat16, 1, 1, 10, lora, adapters=adapters)  # type: ignore[arg-type]
    hook.on_start(trainer)  # type: ignore[arg-type]
    counts = (batch.num_tokens, batch.num_label_tokens, batch.sum_squares)
    hook.after_step(trainer, StepResult(1, 2.0, 1.0, 1e-3, *counts, True))  # type: ignore[arg-type]
    (record,) = logged
    expected = useful_flops(cfg, c, batch) / record["interval_runtime"] / 1e12
    assert record["mfu"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("trained", [False, True])
def test_the_trainer_counts_vision_tokens_and_the_tower_as_bench_does(trained: bool) -> None:
    more = ("fine_tuning=Full",) if trained else ("fine_tuning=LoRA", "lora_rank=32", "freeze_config=freeze_vision")
    work, cfg, logged = WORKLOADS["V1"], keys("stage=VL-SFT", *more), []
    c = MODELS.get("ernie4_5_vl_moe").read_config(dict(work.model), "hf", False, "")
    batch = make_steps(work.rows, 103424, 1, 0, PictureIds.of(work.model))[0].batch
    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **_: None, advance=lambda step: None
    )
    trainer = SimpleNamespace(max_steps=1, state=SimpleNamespace(step=0, packs=0))
    met, seen = (0, 0) if trained else (adapters_met(c, 32), adapters_met(c, 32, vision=True))
    hook = LogHook(
        trackers, Device("a card", "cpu", 0, {torch.bfloat16: 1e15}), c, torch.bfloat16, 1, 1, 10, not trained,  # type: ignore[arg-type]
        adapters=met, vision_training=VisionTraining(trained, trained, adapted=not trained, adapters=seen),
    )  # fmt: skip
    hook.on_start(trainer)  # type: ignore[arg-type]
    counts = (batch.num_tokens, batch.num_label_tokens, batch.sum_squares)
    hook.after_step(trainer, StepResult(1, 2.0, 1.0, 1e-3, *counts, True, shown=batch.shown()))  # type: ignore[arg-type]
    (record,) = logged
    assert record["mfu"] == pytest.approx(useful_flops(cfg, c, batch) / record["interval_runtime"] / 1e15, rel=1e-9)


def test_each_bank_counts_with_its_own_tokens_and_the_tower_with_its_patches() -> None:
    work, cfg = WORKLOADS["V1"], keys("stage=VL-SFT", "fine_tuning=LoRA", "lora_rank=32", "freeze_config=freeze_vision")
    c = MODELS.get("ernie4_5_vl_moe").read_config(dict(work.model), "hf", False, "")
    batch = make_steps(work.rows, 103424, 1, 0, PictureIds.of(work.model))[0].batch
    attention, router, shared = 2560 * 128 * 2 * (20 + 4), 64 * 2560, 3 * 2560 * 3072
    dense = 28 * attention + 3 * 2560 * 12288 + 27 * (router + shared)
    text, vision = (dense + 27 * 6 * 3 * 2560 * width for width in (1536, 512))
    marked = 5 * 1002
    base = 4 * (text * (8192 - marked) + vision * marked + 103424 * 2560 * batch.num_label_tokens)
    base += 6 * 28 * 20 * 128 * batch.sum_squares
    tower = 2 * (32 * 12 * 1280**2 + 588 * 1280) * 20_000 + 4 * 32 * 1280 * 5 * 4000**2
    side = 4 * 1280
    resampler = 4 * 5 * side**2 * 5000 + 4 * side * 2560 * 5000  # forward and the gradient of what adapters see
    adapters = 6 * ((8192 - marked) * adapters_met(c, 32) + marked * adapters_met(c, 32, vision=True))
    assert useful_flops(cfg, c, batch) == pytest.approx(base + tower + resampler + adapters, rel=1e-9)
    assert useful_flops(cfg, c, batch) / 8192 == pytest.approx(15e9, rel=0.1)
