"""What a run takes of a card's memory, and what it is told where that is too much."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config import load
from erniekit.devices.cpu import CpuDevice
from erniekit.devices.cuda import CudaDevice
from erniekit.errors import ConfigError
from erniekit.models.config import BankShape, MoEShape, VisionShape
from erniekit.models.costs import optimizer_bytes, parameters
from erniekit.recipes.memory_decisions import (
    GIB,
    advise,
    check_backward_updates,
    host_layers,
    kept_bytes,
    least_bytes,
    numbers_of,
    vision_bytes,
)
from unit.recipes.test_speed_decisions import ALONE, LARGE, SMALL


def card(gib: float = 139.8) -> CudaDevice:
    return CudaDevice("H200", "cuda", int(gib * GIB))


def run(*words: str) -> Any:
    fixed = ["model_name_or_path=x", "train_dataset_path=y", "fine_tuning=Full", "max_seq_len=8192", "recompute=True"]
    return load([*fixed, *words], "train")


EXACT = ("master_weights=exact16", "optim_states=8bit", "update_in_backward=True")
LIGHT = ("master_weights=none", "optim_states=8bit", "update_in_backward=True")


def test_bytes_of_a_trained_weight_by_each_choice() -> None:
    assert optimizer_bytes() == 12
    assert optimizer_bytes("8bit", "exact16") == pytest.approx(4.047, abs=1e-3)
    assert optimizer_bytes("8bit", "none") == pytest.approx(2.047, abs=1e-3)
    states, gradient = kept_bytes(run(*EXACT), LARGE)
    assert (states, gradient) == (pytest.approx(4.047, abs=1e-3), pytest.approx(2 / 28))
    assert kept_bytes(run("offload_optim=True"), LARGE) == (0.0, 2)
    assert kept_bytes(run("gradient_accumulation_steps=4"), LARGE) == (12, 4)


def test_the_21b_fits_a_card_in_both_modes_that_update_in_backward() -> None:
    assert parameters(LARGE) == pytest.approx(21.8e9, rel=0.02)
    assert least_bytes(run(), LARGE) / GIB == pytest.approx(327, abs=3)
    assert least_bytes(run(*EXACT), LARGE) / GIB == pytest.approx(128, abs=3)
    assert least_bytes(run(*LIGHT), LARGE) / GIB == pytest.approx(87, abs=3)


def test_a_run_that_does_not_fit_is_told_the_least_that_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = advise(run("gradient_accumulation_steps=8"), card(), ALONE, LARGE, 126 * GIB)
    assert line is not None
    assert "set optim_states: 8bit, master_weights: exact16" in line
    assert "update_in_backward: True" in line
    assert "gradient_accumulation_steps: 1" in line
    assert "recompute" not in line, "it is on"
    assert line in capsys.readouterr().err
    assert "recompute: True" in str(advise(run("recompute=False"), card(), ALONE, LARGE, 126 * GIB))
    assert "offload_optim: True" in str(advise(run(), card(110), ALONE, LARGE, 126 * GIB))
    assert "master_weights: none" in str(advise(run(), card(96), ALONE, LARGE, 64 * GIB))
    assert "LoRA" in str(advise(run(), card(40), ALONE, LARGE, 126 * GIB))


def test_nothing_is_said_where_it_fits_or_where_nothing_is_known() -> None:
    assert advise(run(*EXACT), card(), ALONE, LARGE, 126 * GIB) is None
    assert advise(run(), card(), ALONE, SMALL) is None
    assert advise(run("fine_tuning=LoRA"), card(), ALONE, LARGE, 126 * GIB) is None
    assert advise(run(), CpuDevice("CPU", "cpu", 8 * GIB), ALONE, LARGE, 126 * GIB) is None


def test_several_ranks_cannot_update_in_backward() -> None:
    several: Any = SimpleNamespace(size=2)
    with pytest.raises(ConfigError, match="2 ranks") as caught:
        check_backward_updates(run(*EXACT), several)
    assert "update_in_backward" in caught.value.fix
    check_backward_updates(run(), several)


# --- packed layers in host memory


HUGE = replace(
    LARGE, hidden_size=8192, intermediate_size=28672, num_layers=54, num_heads=64, num_kv_heads=8,
    tie_word_embeddings=False, moe=MoEShape(experts=64, choices=8, width=3584, shared_width=0, start=3, end=53),
)  # fmt: skip
ADAPTERS = ("fine_tuning=LoRA", "lora_rank=32", "compute_type=wint4/8", "offload_optim=True")


def decided(model: Any, *words: str, gib: float = 139.8) -> dict[str, Any]:
    return {note.key: note.new for note in host_layers(run(*words), card(gib), ALONE, model)}


def test_a_300b_base_in_4_bit_leaves_about_twenty_layers_in_host_memory() -> None:
    found = decided(HUGE, *ADAPTERS, "memory_limit=134")
    assert parameters(HUGE) == pytest.approx(300e9, rel=0.02)
    assert 14 <= found["frozen_layers_in_host"] <= 26
    where = numbers_of(HUGE, found["frozen_layers_in_host"], "wint4/8")
    assert len(where) == found["frozen_layers_in_host"]
    assert min(where) >= 3, "dense layers are small"
    assert max(b - a for a, b in pairwise(where)) <= 4, "spread, so that copies have time"


def test_what_fits_stays_on_the_device_and_what_the_user_says_holds() -> None:
    assert decided(LARGE, *ADAPTERS) == {"frozen_layers_in_host": 0}
    assert decided(LARGE, *ADAPTERS, "frozen_layers_in_host=3") == {}
    assert decided(LARGE, "fine_tuning=LoRA", "frozen_layers_in_host=3") == {"frozen_layers_in_host": 0}, "not packed"
    small = decided(LARGE, *ADAPTERS, "memory_limit=16")["frozen_layers_in_host"]
    assert 0 < small <= decided(LARGE, *ADAPTERS, "memory_limit=14")["frozen_layers_in_host"]


def test_a_limit_that_is_too_low_with_all_layers_in_host_memory_is_told_with_the_least_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    decided(LARGE, *ADAPTERS, "memory_limit=0.001")
    told = capsys.readouterr().err
    assert "memory_limit: 0.001 (GiB) is too low: weights alone take " in told
    assert " take 0 GiB" not in told
    least = told.partition("the least that works is memory_limit: ")[2].partition(",")[0]
    decided(LARGE, *ADAPTERS, f"memory_limit={least}")
    assert not capsys.readouterr().err


def test_layers_in_host_memory_are_computed_again() -> None:
    found = decided(LARGE, *ADAPTERS, "frozen_layers_in_host=2", "recompute=False")
    assert found == {"recompute": True, "recompute_granularity": "full"}
    kept = decided(LARGE, *ADAPTERS, "frozen_layers_in_host=28", "no_recompute_layers=0,1,2")
    assert kept == {"no_recompute_layers": ()}


@pytest.mark.parametrize("count", [1, 2, 5, 27, 28])
def test_as_many_layers_as_asked_for_are_chosen_once_each(count: int) -> None:
    where = numbers_of(LARGE, count, "wint4/8")
    assert len(set(where)) == count == len(where)
    assert list(where) == sorted(where)


# ERNIE-4.5-VL-28B-A3B
SEEING = replace(
    LARGE, family="ernie4_5_vl_moe", vision=VisionShape(depth=32, width=1280, heads=16, mlp_width=5120, patch=14),
    moe=replace(LARGE.moe, vision=BankShape(64, 512)),
)  # fmt: skip


def test_a_tower_that_is_trained_keeps_what_a_pack_of_pictures_leaves_in_it() -> None:
    whole = vision_bytes(run("stage=VL-SFT"), SEEING, again=False) / GIB
    patches = 4 * 8192
    assert whole == pytest.approx(2 * patches * (32 * (10 * 1280 + 3 * 5120) + 1280 + 588 + 10 * 1280) / GIB)
    assert 50 < whole < 60
    assert vision_bytes(run("stage=VL-SFT"), SEEING, again=True) / GIB < 6
    assert vision_bytes(run("stage=VL-SFT", "max_patches=4096"), SEEING, again=False) / GIB == pytest.approx(whole / 8)


@pytest.mark.parametrize("words", [("freeze_config=freeze_vision",), ("fine_tuning=LoRA",)])
def test_in_front_of_a_frozen_tower_the_resampler_alone_keeps_something(words: tuple[str, ...]) -> None:
    kept = vision_bytes(run("stage=VL-SFT", *words), SEEING, again=False)
    assert kept == 2 * 8192 * 10 * 4 * 1280
    assert vision_bytes(run("stage=VL-SFT", "freeze_config=[freeze_vision,freeze_resampler]"), SEEING, False) == 0
    assert vision_bytes(run("stage=SFT"), SEEING, again=False) == 0, "text alone"


def test_a_step_that_fits_is_one_with_the_towers_share() -> None:
    frozen, trained = (least_bytes(run("stage=VL-SFT", *w), SEEING) for w in (("freeze_config=freeze_vision",), ()))
    assert trained - frozen > GIB
