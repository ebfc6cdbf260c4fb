"""`erniekit train` with the methods of docs/methods.md: chosen weights, noise, Muon, DoRA, PiSSA, staged mixtures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model


def changed(before: Path, after: Path) -> set[str]:
    """The first words of the weights that training moved."""
    old, new = (ModelFolder(folder).build().state_dict() for folder in (before, after))
    return {name.split(".")[0] for name, value in old.items() if not torch.equal(value, new[name])}


def test_layers_that_predict_further_tokens_are_trained_alone(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_tiny_model(tmp_path / "moe", family="ernie4_5_moe")
    keys = dict(train_only="mtp", num_nextn_predict_layers=1, moe_use_aux_free_update_coef=0.1, max_steps=2)
    train(tmp_path / "out", model_name_or_path=base, doctor="off", **keys)
    assert changed(base, tmp_path / "out") == {"mtp"}
    assert "weights (27.7%), 9 of 27 tensors (train_only: mtp)" in capsys.readouterr().out


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())]


def test_noise_is_in_training_alone_and_a_resumed_run_draws_the_same(train: Callable, tmp_path: Path) -> None:
    keys = dict(neftune_noise_alpha=20.0, doctor="off", max_steps=4, save_steps=2, gradient_accumulation_steps=1)
    train(tmp_path / "plain", **{**keys, "neftune_noise_alpha": 0})
    train(tmp_path / "whole", **keys)
    train(tmp_path / "parts", **{**keys, "resume_from_checkpoint": tmp_path / "whole" / "checkpoint-2"})
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[2:]
    assert abs(losses(tmp_path / "whole")[0] - losses(tmp_path / "plain")[0]) > 1e-4
    probes = [ModelFolder(tmp_path / name).build().train()(torch.arange(9)[None]) for name in ("whole", "parts")]
    assert torch.equal(*probes), "a model outside of a training step has no noise"


def test_a_mixture_that_changes_and_a_curriculum_resume_exactly(
    train: Callable, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows.read_text().splitlines()
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, file in enumerate(files):
        numbered = ({**json.loads(line), "hard": -k} for k, line in enumerate(lines[number::2]))
        file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in numbered))
    keys = dict(
        train_dataset_path=",".join(map(str, files)), mix_schedule="3=0/1", train_dataset_prob="1,0", packing=False,
        curriculum="hard", max_steps=5, save_steps=3, doctor="off", gradient_accumulation_steps=1, max_bad_fraction=1,
    )  # fmt: skip
    train(tmp_path / "whole", **keys)
    train(tmp_path / "parts", **keys, resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")[3:]
    assert "mix      from step 1: 1/0; from step 3: 0/1" in capsys.readouterr().out
