"""`erniekit train` on text alone with a vision model: all weights or adapters, its checks, its files, a resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from support.recorded_vision import FOLDER, logits_of, recorded_batch


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    for source in ("vl_old", "tokenizer"):
        for file in (FOLDER / source).iterdir():
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.full
def test_text_trains_the_text_side_and_a_resumed_run_ends_on_the_same_bits(
    seeing: Path, train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = dict(model_name_or_path=seeing, max_steps=4, save_steps=2, weight_decay=0, moe_aux_loss_lambda=1e-2)
    train(tmp_path / "whole", **keys)
    assert "gradients reach all" in capsys.readouterr().out
    train(tmp_path / "cut", **keys)
    for path in (tmp_path / "cut").iterdir():
        if path.name != "checkpoint-2":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(tmp_path / "cut", **keys)
    before, whole, cut = (ModelFolder(f).build().state_dict() for f in (seeing, tmp_path / "whole", tmp_path / "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    moved = {name for name in whole if not torch.equal(whole[name], before[name])}
    assert {"layers.1.mlp.text.router.weight", "layers.1.mlp.shared.down.weight", "embed.weight"} <= moved
    assert not [n for n in moved if n.startswith(("tower.", "resampler.")) or ".vision." in n], "they saw nothing"


def test_adapters_of_a_text_run_are_exported_merged_and_see_as_the_base_did(
    seeing: Path, train: Callable, tmp_path: Path
) -> None:
    from erniekit.export.run import export

    train(tmp_path / "out", model_name_or_path=seeing, max_steps=2, fine_tuning="LoRA", lora_rank=2, learning_rate=1e-5)
    merged = export(seeing, tmp_path / "out", tmp_path / "merged", layout="hf")
    assert ModelFolder(merged).layout == "hf"
    batch = recorded_batch("one_image")
    logits, base = (logits_of(ModelFolder(f).build(), batch) for f in (merged, seeing))
    assert 0 < (logits - base).abs().max() < 1
