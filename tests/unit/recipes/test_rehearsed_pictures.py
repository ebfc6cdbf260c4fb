"""A vision-language model is rehearsed with pictures on some ranks and text alone on others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.demo.tiny_vision import SHAPE
from erniekit.devices.base import GIB
from erniekit.recipes.rehearsal import no_card, plan_for, prepare
from erniekit.recipes.rehearse_command import layout_on
from erniekit.recipes.rehearsed_batches import batch_for


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "im_patch_id": 5}))
    keys = dict(
        stage="VL-SFT", model_name_or_path=tmp_path, train_dataset_path="none.jsonl", tensor_parallel_degree=2,
        sequence_parallel=True, max_seq_len=64, gradient_accumulation_steps=2, compute_type="bf16", device="cpu",
        moe_group="mp",
    )  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    "more",
    [
        ["data_parallel_degree=2"],
        pytest.param(["fine_tuning=LoRA", "sharding_parallel_degree=2"], marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_all_ranks_match_though_half_of_them_see(words, capsys, more):
    assert main(["rehearse", *words, *more]) == 0
    out = capsys.readouterr().out
    assert "kinds    4 among 4 ranks" in out
    assert "all ranks' calls match" in out


def test_ranks_take_turns_and_every_slice_has_as_many_vision_tokens(words, tmp_path):
    cfg = load([*words, "data_parallel_degree=2"], "train")
    job = prepare(cfg, layout_on(cfg, None), tmp_path)
    plans = [plan_for(job, rank, no_card()) for rank in range(4)]
    seen = [[batch_for(plan, number).vision is not None for number in range(2)] for plan in plans]
    assert seen == [[True, False]] * 2 + [[False, True]] * 2
    batch = batch_for(plans[0], 0)
    of_slices = [int((part != 0).sum()) for part in batch.modality.chunk(2, dim=1)]
    assert of_slices == [16, 16]
    assert len(batch.vision.places) == 32
    assert {int(t) for t, _, _ in batch.vision.grids} == {1, 2}  # a picture and a video
    assert batch.vision.patches.shape[0] == int(batch.vision.grids.prod(1).sum())


def test_a_rank_larger_than_the_device_is_refused_before_it_is_built(words, capsys, monkeypatch):
    from dataclasses import replace

    from erniekit import devices

    real = devices.pick
    monkeypatch.setattr(devices, "pick", lambda *asked: replace(real("cpu"), total_memory=GIB // 4096))
    assert main(["rehearse", *words, "--rank", "0"]) == 2
    error, where, fix = capsys.readouterr().err.strip().splitlines()[-3:]
    assert "rank 0 of 2 does not fit" in error
    assert "planned" in where
    assert "erniekit plan" in fix
