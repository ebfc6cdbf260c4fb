"""What looks like the run that was stopped and is another: refused by name, though the probe would be reproduced."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import erniekit
from erniekit.checkpoint.identity import model_identity, read_base
from erniekit.data.mmap_files import write_idx
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from support.recorded import whole_pairs


def token_files(prefix: Path, seed: int, tokens: int) -> Path:
    """Documents of 64 tokens, at least 2 MiB away from both ends in their middle."""
    np.random.RandomState(seed).randint(10, 1000, tokens).astype("<u2").tofile(f"{prefix}.bin")
    sizes = np.full(tokens // 64, 64)
    with open(f"{prefix}.idx", "wb") as out:
        write_idx(out, np.dtype("<u2"), sizes, np.arange(len(sizes) + 1))
    return prefix


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("another") / "llama", family="llama")


@pytest.fixture
def pretrain(llama: Path, tmp_path: Path) -> Callable[..., Any]:
    def go(**keys: object) -> Any:
        values = dict(
            stage="PT", model_name_or_path=llama, continue_training=False, output_dir=tmp_path / "out", max_steps=2,
            cache_dir=tmp_path / "cache", max_seq_len=64, compute_type="fp32", device="cpu", report_to="none",
            doctor="off", save_steps=1,
        )  # fmt: skip
        return erniekit.run("train", **{**values, **keys})

    return go


def refused(run: Callable[[], Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run()
    assert key in caught.value.where


def test_a_token_file_changed_in_its_middle_is_other_data(pretrain: Callable, tmp_path: Path) -> None:
    prefix = token_files(tmp_path / "web", 1, 1 << 21)  # 4 MiB: more than a megabyte at either end
    pretrain(input_dir=prefix)
    pretrain(input_dir=prefix)
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[len(raw) // 2] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    refused(lambda: pretrain(input_dir=prefix), "train data")


def test_exchanged_weights_of_a_blend_are_another_run(pretrain: Callable, tmp_path: Path) -> None:
    web, books = (token_files(tmp_path / name, k, 1 << 13) for k, name in enumerate(("web", "books")))
    pretrain(input_dir=f"0.7 {web} 0.3 {books}")
    pretrain(input_dir=f"7 {web} 3 {books}")  # the same shares
    refused(lambda: pretrain(input_dir=f"0.3 {web} 0.7 {books}"), "train data")
    refused(lambda: pretrain(input_dir=f"0.3 {books} 0.7 {web}"), "train data")


def test_exchanged_files_of_a_mix_are_another_run(train: Callable, rows: Path, tmp_path: Path) -> None:
    lines = rows.read_text().splitlines(keepends=True)
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("".join(lines[:8]))
    other.write_text("".join(lines[8:]))
    keys = dict(doctor="off", max_steps=1)
    train(tmp_path / "run", train_dataset_path=f"{one},{other}", train_dataset_prob="0.7,0.3", **keys)
    mixed = dict(train_dataset_path=f"{other},{one}", **keys)
    refused(lambda: train(tmp_path / "run", train_dataset_prob="0.7,0.3", **mixed), "train data")
    refused(lambda: train(tmp_path / "run", train_dataset_prob="0.3,0.7", **mixed), "train_dataset_prob")


def test_rows_that_another_length_cuts_are_not_called_other_data(train: Callable, rows: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(rows.read_text())
    keys = dict(train_dataset_path=own, doctor="off", max_steps=1)
    train(tmp_path / "run", **keys)
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", max_seq_len=64, **keys)
    assert caught.value.where == "max_seq_len: 96 -> 64"
    own.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", max_seq_len=64, **keys)
    assert "max_seq_len: 96 -> 64" in caught.value.where
    assert "own.jsonl has other content" in caught.value.where


def test_a_full_run_stores_no_base_so_nothing_is_said_of_versions(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path, doctor="off", max_steps=1)
    refused(lambda: train(tmp_path, doctor="off", max_steps=1, fine_tuning="LoRA"), "fine_tuning")
    assert "another version" not in capsys.readouterr().out


def another(model: Path, to: Path) -> Path:
    """The same shapes and dates, other numbers: in the upper layers alone, where a short probe may not look."""
    shutil.copytree(model, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        tensors[names[-1]] = tensors[names[-1]] + 0.5
        save_file(tensors, file)
    return to


@pytest.mark.parametrize("first", ["Full", "LoRA"])
def test_another_recipe_in_a_folder_that_holds_a_run_is_told_to_name_its_own(
    train: Callable, tmp_path: Path, first: str
) -> None:
    second = {"Full": "LoRA", "LoRA": "Full"}[first]
    train(tmp_path / "out", max_steps=1, fine_tuning=first)
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "out", max_steps=1, fine_tuning=second)
    assert "fine_tuning" in error.value.where
    assert "the same command with output_dir=OTHER" in error.value.fix
    train(tmp_path / "other", max_steps=1, fine_tuning=second)


def test_a_preference_run_is_not_resumed_against_another_reference(
    train: Callable, tiny_model: Path, paddle: Path, tmp_path: Path
) -> None:
    """All weights are trained, so the policy comes from the checkpoint and its probe is reproduced."""
    keys = dict(
        stage="DPO", train_dataset_path=whole_pairs(paddle, tmp_path / "pairs.jsonl"), max_seq_len=160, doctor="off",
        max_steps=2, save_steps=1,
    )  # fmt: skip
    train(tmp_path / "run", **keys)
    other = another(tiny_model, tmp_path / "other")
    refused(lambda: train(tmp_path / "run", model_name_or_path=other, **keys), "base model")
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    os.utime(next(copy.glob("*.safetensors")))
    train(tmp_path / "run", model_name_or_path=copy, **keys)  # the same one elsewhere
    free = dict(keys, loss_type="simpo")
    train(tmp_path / "free", **free)
    train(tmp_path / "free", model_name_or_path=other, **free)  # no reference, and all weights are in the checkpoint


def test_an_adapter_without_a_probe_is_not_resumed_on_another_base(
    train: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    keys = dict(fine_tuning="LoRA", probe_tokens=0, doctor="off", max_steps=2, save_steps=1)
    train(tmp_path / "run", **keys)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert read_base(folder) == model_identity(tiny_model), "for whoever puts the adapter on a base"
    other = another(tiny_model, tmp_path / "other")
    refused(lambda: train(tmp_path / "run", model_name_or_path=other, **keys), "base model")
    train(tmp_path / "run", **keys)


def test_a_changed_config_json_is_another_model(train: Callable, tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    keys = dict(model_name_or_path=other, probe_tokens=0, doctor="off", max_steps=2, save_steps=1)
    train(tmp_path / "run", **keys)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1234.0}))
    refused(lambda: train(tmp_path / "run", **keys), "config.json")


def test_a_large_file_written_since_is_told_of(
    pretrain: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Above WHOLE only samples are compared: the same ones with another date are resumed with a warning."""
    monkeypatch.setattr("erniekit.data.mmap_files.WHOLE", 1 << 17)
    prefix = token_files(tmp_path / "web", 1, 1 << 17)
    pretrain(input_dir=prefix)
    pretrain(input_dir=prefix)
    assert "another date" not in capsys.readouterr().err
    os.utime(f"{prefix}.bin", (1, 1))
    pretrain(input_dir=prefix)
    assert "web.bin has another date" in capsys.readouterr().err


def test_a_checkpoint_that_promised_less_is_resumed_and_says_what_was_not_compared(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from erniekit.checkpoint import manifest

    train(tmp_path, doctor="off", max_steps=2)
    folder = tmp_path / "checkpoint-2"
    state = json.loads((folder / "state.json").read_text())
    del state["promise"]["train data (content and shares)"]
    (folder / "state.json").write_text(json.dumps(state))
    sealed = manifest.load(folder)
    sealed.files["state.json"] = manifest.measure(folder / "state.json")
    (folder / manifest.MANIFEST).write_bytes(sealed.to_bytes())
    train(tmp_path, doctor="off", max_steps=2)
    assert "could not be compared: train data" in capsys.readouterr().out
