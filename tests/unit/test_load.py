"""`load`: every kind of folder a run leaves behind or a hub offers gives a model that answers and its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from erniekit.api_load import find_model, load
from erniekit.checkpoint.identity import model_identity, write_base
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.errors import CheckpointError, ConfigError
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject, lora_linears
from erniekit.lora.settings import LoRASettings
from support.merged import fold

IDS = torch.tensor([[3, 70, 90, 101, 4, 200], [7, 7, 8, 9, 10, 11]])


@pytest.fixture(scope="module")
def base(paddle: Path, tmp_path_factory) -> Path:
    """The recorded dense model in HF layout, with its tokenizer beside it."""
    folder = ModelFolder(paddle / "dense_old")
    target = tmp_path_factory.mktemp("models") / "base"
    get = folder.build().state_dict().__getitem__
    write_model(target, folder.config, get, tokenizer_from=paddle / "tokenizer")
    return target


def adapted(base: Path):
    model = ModelFolder(base).build()
    settings = LoRASettings(rank=4, alpha=8)
    inject(model, settings, seed=1)
    with torch.no_grad():
        for _, module in lora_linears(model):
            for pair in module.pairs().values():
                pair.B.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    return model, settings


def save_adapter(base: Path, target: Path, said_base: str | None, layout: str = "hf") -> torch.Tensor:
    """Writes the adapter with `said_base` as its word for the base; returns the logits to expect."""
    model, settings = adapted(base)
    write_adapter(target, adapter_of(model, settings, base=said_base), model, layout)
    with torch.no_grad():
        return model(IDS)


def plain(base: Path) -> torch.Tensor:
    with torch.no_grad():
        return ModelFolder(base).build()(IDS)


def test_a_base_folder_gives_logits_and_a_tokenizer(base, paddle):
    model, tokenizer = load(base)
    assert not model.training
    assert model(IDS).shape == (2, 6, 512)
    assert torch.equal(model(IDS), plain(base))
    assert tokenizer.decode(tokenizer.encode_text("hello")) == "hello"
    expected = load_file(paddle / "dense.safetensors")
    torch.testing.assert_close(model(expected["input_ids"]), expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["dense_old", "dense_new", "llama_fused"])
def test_paddle_and_hf_layouts_load_alike(paddle, tmp_path, name):
    shutil.copytree(paddle / name, tmp_path / name)
    shutil.copytree(paddle / "tokenizer", tmp_path / name, dirs_exist_ok=True)
    model, _ = load(str(tmp_path / name))
    assert torch.equal(model(IDS), ModelFolder(paddle / name).build()(IDS))


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), (None, torch.float32)])
def test_the_dtype_may_be_named(base, asked, dtype):
    model, _ = load(base, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_an_unknown_dtype_is_refused(base):
    with pytest.raises(ConfigError, match="int8"):
        load(base, dtype="int8")


@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_an_adapter_folder_loads_on_its_base_unmerged(base, tmp_path, layout):
    expected = save_adapter(base, tmp_path / "adapter", str(base), layout)
    model, tokenizer = load(tmp_path / "adapter")
    assert lora_linears(model)
    assert torch.equal(model(IDS), expected)
    assert not torch.allclose(expected, plain(base))
    assert tokenizer.vocab_size == 512
    assert not any(p.requires_grad for p in model.parameters())


def test_a_base_named_relative_to_the_adapter_is_found(base, tmp_path):
    shutil.copytree(base, tmp_path / "run" / "base")
    expected = save_adapter(base, tmp_path / "run" / "adapter", "../base")
    assert torch.equal(load(tmp_path / "run" / "adapter")[0](IDS), expected)


def test_a_base_named_relative_to_the_working_folder_is_found(base, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "models" / "tiny")
    expected = save_adapter(base, tmp_path / "out", "models/tiny")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(load("out")[0](IDS), expected)


def test_a_base_that_is_gone_is_an_error_that_names_it_and_can_be_given(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    expected = save_adapter(base, tmp_path / "adapter", "someone/gone-model")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "adapter")
    assert "someone/gone-model" in caught.value.what
    assert "hf download someone/gone-model" in caught.value.fix
    assert torch.equal(load(tmp_path / "adapter", base=base)[0](IDS), expected)


def test_a_changed_base_is_refused_without_a_probe_too(base, tmp_path):
    place = tmp_path / "base"
    shutil.copytree(base, place)
    expected = save_adapter(place, tmp_path / "adapter", str(place))
    write_base(tmp_path / "adapter", model_identity(place), str(place))
    assert torch.equal(load(tmp_path / "adapter")[0](IDS), expected)
    model = ModelFolder(place).build()
    with torch.no_grad():
        model.norm.weight.mul_(1.01)
    write_model(place, ModelFolder(place).config, model.state_dict().__getitem__, tokenizer_from=base)
    with pytest.raises(CheckpointError, match="trained on another model") as caught:
        load(tmp_path / "adapter")
    assert str(place) in caught.value.what
    assert "override_base" in caught.value.fix
    assert load(tmp_path / "adapter", override_base=True)[0](IDS).shape == (2, 6, 512)


def test_a_relative_word_for_a_base_that_is_not_here_is_no_hub_id_for_sure(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    save_adapter(base, tmp_path / "adapter", "models/tiny")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is not here: models/tiny") as caught:
        load(tmp_path / "adapter")
    assert caught.value.fix.startswith(f"name it: lora_path={tmp_path / 'adapter'} model_name_or_path=DIR")
    assert "if it is a hub id, download it first: hf download models/tiny" in caught.value.fix


def test_an_adapter_that_names_no_base_is_an_error_with_the_way_out(base, tmp_path):
    save_adapter(base, tmp_path / "adapter", None)
    with pytest.raises(CheckpointError, match="does not name") as caught:
        load(tmp_path / "adapter")
    assert "base=" in caught.value.fix


def test_paddles_recorded_adapter_loads_and_gives_paddles_logits(base, paddle):
    numbers = load_file(paddle / "dense.safetensors")
    model, _ = load(paddle / "dense_lora", base=base)
    torch.testing.assert_close(model(numbers["input_ids"]), numbers["lora.logits"], atol=1e-4, rtol=0)


def test_a_merged_folder_loads(base, tmp_path):
    model, _ = adapted(base)
    merged = fold(model)
    write_model(tmp_path, ModelFolder(base).config, merged.state_dict().__getitem__, tokenizer_from=base)
    assert torch.equal(load(tmp_path)[0](IDS), merged(IDS))


def test_an_output_dir_gives_its_newest_checkpoint_and_then_its_final_model(base, tmp_path):
    for step, scale in ((9, 0.5), (10, 2.0), (0, 3.0)):
        model = ModelFolder(base).build()
        with torch.no_grad():
            model.norm.weight.mul_(scale)
        target = tmp_path / f"checkpoint-{step}" if step else tmp_path / "aside"
        write_model(target, ModelFolder(base).config, model.state_dict().__getitem__, tokenizer_from=base)
    expected = plain(base)
    torch.testing.assert_close(load(tmp_path)[0](IDS), 2.0 * expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(load(tmp_path / "checkpoint-9")[0](IDS), 0.5 * expected, atol=1e-4, rtol=1e-5)
    shutil.copytree(tmp_path / "aside", tmp_path, dirs_exist_ok=True)
    torch.testing.assert_close(load(tmp_path)[0](IDS), 3.0 * expected, atol=1e-4, rtol=1e-5)


def test_a_checkpoint_of_adapters_loads_through_the_output_dir(base, tmp_path):
    expected = save_adapter(base, tmp_path / "checkpoint-3", str(base))
    assert torch.equal(load(tmp_path)[0](IDS), expected)


def test_an_adapters_own_chat_template_wins_over_its_bases(base, tmp_path):
    save_adapter(base, tmp_path / "adapter", str(base))
    for file in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(base / file, tmp_path / "adapter")
    assert load(tmp_path / "adapter")[1].folder == base  # copies: the base's, beside its config.json
    changed = json.loads((base / "tokenizer_config.json").read_text())
    changed["chat_template"] = "{{ messages[0].content }}"
    (tmp_path / "adapter" / "tokenizer_config.json").write_text(json.dumps(changed))
    assert load(tmp_path / "adapter")[1].chat_template == "{{ messages[0].content }}"


def test_a_folder_with_nothing_in_it_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match="neither a model, an adapter nor"):
        load(tmp_path)


def test_a_model_without_tokenizer_files_comes_with_none(paddle):
    model, tokenizer = load(paddle / "dense_new")
    assert tokenizer is None
    assert model(IDS).shape[:2] == IDS.shape


@pytest.mark.parametrize("fault", ["cut short", "settings alone", "link to nowhere", "another program's"])
def test_broken_tokenizer_files_are_an_error_not_none(fault, base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    vocabulary = folder / "tokenizer.model"
    content = vocabulary.read_bytes()
    vocabulary.unlink()
    if fault != "settings alone":
        (folder / "tokenizer_config.json").unlink()
        (folder / "special_tokens_map.json").unlink()
    if fault == "cut short":
        vocabulary.write_bytes(content[:100])
    elif fault == "link to nowhere":
        vocabulary.symlink_to(tmp_path / "gone")
    elif fault == "another program's":
        (folder / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(folder) in error.value.where
    assert error.value.fix


def test_what_needs_a_tokenizer_says_how_to_name_one(paddle):
    with pytest.raises(CheckpointError) as error:
        find_model(paddle / "dense_new").tokenizer()
    assert "without a tokenizer" in error.value.what
    assert "tokenizer_name=DIR" in error.value.fix
    assert find_model(paddle / "dense_new").tokenizer(paddle / "tokenizer").vocab_size == 512
