"""Reading model folders: both layouts, sharded or not, and every way a folder can be broken as one clean error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.errors import CheckpointError


@pytest.fixture
def folder(paddle: Path, tmp_path: Path) -> Path:
    """A whole HF-layout model in one file, to break."""
    target = tmp_path / "model"
    target.mkdir()
    shutil.copy(paddle / "dense_new" / "config.json", target)
    shutil.copy(paddle / "dense_new" / "model-00001-of-00001.safetensors", target / "model.safetensors")
    return target


def sharded(folder: Path, tmp_path: Path) -> Path:
    opened = ModelFolder(folder)
    model = opened.build()
    target = tmp_path / "sharded"
    write_model(target, opened.config, model.state_dict().__getitem__, max_shard_size=1e-4)
    assert len(list(target.glob("model-*.safetensors"))) > 2
    return target


def edit_config(folder: Path, **changes) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        ModelFolder(folder).build()
    assert str(folder) in caught.value.where
    return caught.value


def test_layout_is_told_by_tensor_names(paddle):
    assert ModelFolder(paddle / "dense_old").layout == "paddle"
    assert ModelFolder(paddle / "dense_new").layout == "hf"
    assert ModelFolder(paddle / "llama_fused").layout == "paddle"


def test_both_layouts_of_one_model_give_the_same_bits(paddle):
    old, new = (ModelFolder(paddle / name).build().state_dict() for name in ("dense_old", "dense_new"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_shards_with_an_index_and_without_give_the_same_bits(folder, tmp_path):
    whole = ModelFolder(folder).build().state_dict()
    target = sharded(folder, tmp_path)
    for _ in range(2):
        parts = ModelFolder(target).build().state_dict()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)
        (target / "model.safetensors.index.json").unlink(missing_ok=True)


def test_the_dtype_is_the_files_unless_asked_otherwise(folder):
    assert ModelFolder(folder).build().embed.weight.dtype == torch.float32
    assert ModelFolder(folder).build(torch.bfloat16).embed.weight.dtype == torch.bfloat16
    edit_weights(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    assert {p.dtype for p in ModelFolder(folder).build().parameters()} == {torch.bfloat16}


def test_bf16_bits_stored_as_uint16_are_read_as_bf16(folder):
    expected = ModelFolder(folder).build(torch.bfloat16).state_dict()
    edit_weights(folder, lambda t: t.update({k: v.bfloat16().view(torch.uint16) for k, v in t.items()}))
    got = ModelFolder(folder).build().state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_redundant_tied_head_and_stored_frequencies_are_accepted(folder):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    expected = ModelFolder(folder).build().state_dict()
    edit_weights(folder, add)
    got = ModelFolder(folder).build().state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_an_index_naming_an_absent_file_is_refused(folder, tmp_path):
    target = sharded(folder, tmp_path)
    next(iter(sorted(target.glob("model-*.safetensors")))).unlink()
    error = refusal(target)
    assert "model-00001-of" in error.what
    assert "download" in error.fix


def test_an_index_that_disagrees_with_its_files_is_refused(folder, tmp_path):
    target = sharded(folder, tmp_path)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    name = "model.norm.weight"
    files = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
    index["weight_map"][name] = files[-1]
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{files[-1]} does not hold '{name}'" in refusal(target).what


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', "[1]", "{not json", "\xff"])
def test_a_broken_index_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert "index.json" in refusal(folder).what


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file_is_refused_by_name(folder, damage):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"cut": data[: len(data) // 2], "header": b"\xff" * 64 + data[64:], "empty": b""}[damage])
    error = refusal(folder)
    assert "model.safetensors is not a valid safetensors file" in error.what


def test_a_missing_tensor_is_named(folder):
    edit_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(folder)
    assert "1 missing tensor " in error.what
    assert "model.layers.1.mlp.up_proj.weight" in error.what


def test_an_unexpected_tensor_is_named(folder):
    edit_weights(folder, lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(8, 64)}))
    error = refusal(folder)
    assert "1 unexpected tensor " in error.what
    assert "mlp.gate.weight" in error.what


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 600}, "vocab_size 600, the weight files have an embedding of [512, 64]"),
        ({"head_dim": 16}, "q_proj"),
        # The same number of fused rows, cut elsewhere: 6 + 2 x 1 heads instead of 4 + 2 x 2.
        ({"num_attention_heads": 6, "num_key_value_heads": 1}, "q_proj"),
        ({"intermediate_size": 32}, "gate_proj"),
        ({"num_hidden_layers": 4}, "num_hidden_layers 4, the weight files hold 3 layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2, the weight files hold 3 layers"),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"use_bias": True}, "missing"),
    ],
)
def test_a_config_of_another_model_is_refused(folder, changes, named):
    edit_config(folder, **changes)
    assert named in refusal(folder).what


def test_a_paddle_config_of_another_model_is_refused(paddle, tmp_path):
    target = tmp_path / "llama"
    shutil.copytree(paddle / "llama_fused", target)
    edit_config(target, num_key_value_heads=4)
    assert "qkv_proj" in refusal(target).what


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model_state.pdparams", "consolidated.00.pt"])
def test_pickled_weights_are_refused_without_opening_them(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not opened")
    error = refusal(folder)
    assert name in error.what
    assert "safetensors" in error.fix


def test_a_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "no .safetensors" in refusal(folder).what
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder).what


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_broken_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder).what


def test_nothing_is_read_before_names_and_shapes_are_checked(folder, monkeypatch):
    edit_config(folder, intermediate_size=32)
    opened = ModelFolder(folder)
    monkeypatch.setattr(opened, "tensor", lambda name: pytest.fail(f"read {name}"))
    with pytest.raises(CheckpointError):
        opened.build()
