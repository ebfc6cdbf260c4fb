"""A model's identity: the same for a copy, another for any other model, and cheap for a large one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint import identity
from erniekit.checkpoint.identity import model_identity, read_base, write_base
from erniekit.demo.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("identity") / "model")


def copy_of(model: Path, to: Path) -> Path:
    shutil.copytree(model, to)
    return to


def weight_file(model: Path) -> Path:
    return next(model.glob("model*.safetensors"))


def test_a_copy_elsewhere_with_other_dates_is_the_same_model(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    os.utime(weight_file(copy), (1, 1))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"_name_or_path": "elsewhere", **config}))
    assert model_identity(copy) == model_identity(tiny)


def test_the_same_tensors_in_two_files_are_the_same_model(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    tensors = load_file(weight_file(copy))
    weight_file(copy).unlink()
    names = sorted(tensors)
    for k, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, copy / f"model-{k}.safetensors")
    assert model_identity(copy) == model_identity(tiny)


def test_one_bit_of_a_small_model_makes_another(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    raw = bytearray(weight_file(copy).read_bytes())
    raw[len(raw) * 2 // 3] ^= 1
    weight_file(copy).write_bytes(raw)
    assert model_identity(copy) != model_identity(tiny)


def test_a_value_of_config_json_makes_another(tiny: Path, tmp_path: Path) -> None:
    copy = copy_of(tiny, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 123.0}))
    assert model_identity(copy) != model_identity(tiny)
    assert model_identity(copy, weights=False) != model_identity(tiny, weights=False)


def test_every_tensor_of_a_large_model_is_sampled_and_little_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large is what is above WHOLE: 4 MiB here."""
    monkeypatch.setattr(identity, "WHOLE", 1 << 20)
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"layer.{k}": torch.randn(1 << 17, generator=torch.Generator().manual_seed(k)) for k in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(identity, "BLOCKS", 64)
    read: list[int] = []
    monkeypatch.setattr(identity.os, "pread", lambda f, n, at, plain=os.pread: (read.append(n), plain(f, n, at))[1])
    before = model_identity(tmp_path)
    assert sum(read) == 64 * identity.BLOCK, "64 places of 4 KiB, not 4 MiB"
    for name in tensors:
        changed = {**tensors, name: tensors[name] + 1e-3}  # as any training step would change it
        save_file(changed, tmp_path / "model.safetensors")
        assert model_identity(tmp_path) != before, name


def test_an_adapter_says_which_base_it_belongs_to(tiny: Path, tmp_path: Path) -> None:
    assert read_base(tmp_path) is None, "one of another program says nothing"
    write_base(tmp_path, model_identity(tiny), str(tiny))
    assert read_base(tmp_path) == model_identity(copy_of(tiny, tmp_path / "copy"))
    assert read_base(tmp_path) != model_identity(make_tiny_model(tmp_path / "other", seed=7))
