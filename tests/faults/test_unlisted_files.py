"""Files put into a published checkpoint or export after it was written: row P4. None of them is read; each is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.api_load import find_model, load
from erniekit.checkpoint import manifest
from erniekit.checkpoint.manager import CheckpointManager, discard_unchanged
from erniekit.checkpoint.manifest import MANIFEST, Manifest
from erniekit.checkpoint.published import check_published
from erniekit.checkpoint.slices import TensorFiles
from erniekit.cli.main import main
from erniekit.errors import CheckpointError
from faults.places import Place, words_of
from faults.results import fault
from support.serving import tiny_folder


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said once in a process, said again in each test."""
    said: list[str] = []
    monkeypatch.setattr("erniekit.files.listed.warn_once", said.append)
    return said


def sealed(folder: Path) -> Path:
    """A manifest of all that is there, as a publication writes it."""
    files = {p.name: manifest.measure(p) for p in sorted(folder.iterdir()) if p.is_file()}
    (folder / MANIFEST).write_bytes(Manifest(files, {}).to_bytes())
    return folder


@pytest.fixture
def model(paddle: Path, tmp_path: Path) -> Path:
    tiny_folder(paddle, tmp_path / "model")
    return sealed(tmp_path / "model")


def zeros_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}


def plant_index(folder: Path) -> list[str]:
    save_file(zeros_of(folder), folder / "model-evil.safetensors")
    index = {"weight_map": dict.fromkeys(zeros_of(folder), "model-evil.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["model.safetensors.index.json"]


def plant_shard(folder: Path) -> list[str]:
    """Where the listed weights are shards without an index, one more is one more model."""
    (folder / MANIFEST).unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    sealed(folder)
    save_file({"evil": torch.zeros(1)}, folder / "model-evil.safetensors")
    return ["model-evil.safetensors"]


def plant_whole(folder: Path) -> list[str]:
    """model.safetensors goes before shards."""
    (folder / MANIFEST).unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    sealed(folder)
    tensors = load_file(folder / "model-00001-of-00001.safetensors")
    save_file({n: torch.zeros_like(t) for n, t in tensors.items()}, folder / "model.safetensors")
    return ["model.safetensors"]


def plant_adapter(folder: Path) -> list[str]:
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "base_model_name_or_path": "/nowhere"}))
    return ["adapter_config.json"]


def plant_probe(folder: Path) -> list[str]:
    (folder / "probe.safetensors").write_bytes(b"evil")
    return ["probe.safetensors"]


PLANTS = (plant_index, plant_shard, plant_whole, plant_adapter)


def test_planted_weights_index_and_adapter_are_not_read_and_are_named(model, tmp_path, warnings):
    wanted = load(model)[0].state_dict()
    with fault("P4", "weights, an index and an adapter put into a published model") as row:
        for plant in PLANTS:
            row.count += 1
            folder = tmp_path / plant.__name__
            shutil.copytree(model, folder)
            planted = plant(folder)
            row.hits += all((folder / name).exists() for name in planted)
            got = load(folder)[0].state_dict()
            assert got.keys() == wanted.keys(), plant
            assert all(torch.equal(got[name], wanted[name]) for name in wanted), plant
            for name in planted:
                assert any(f"{folder / name} is not listed in MANIFEST.json, ignored" in text for text in warnings)
        assert row.hits == len(PLANTS)
        row.note = "not read, named in a warning; the model has the bits it was published with"


def test_without_the_manifest_the_same_plant_acts(model):
    """The fault is one: a folder that nobody vouches for is read whole."""
    plant_index(model)
    (model / MANIFEST).unlink()
    state = load(model)[0].state_dict()
    assert all(not tensor.any() for tensor in state.values())


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "added_tokens.json"])
def test_a_tokenizer_file_put_beside_a_published_model_is_refused_with_what_to_do(model, name):
    with fault("P4", "tokenizer files and templates put into a published model") as row:
        row.count += 1
        (model / name).write_text("{}")
        with pytest.raises(CheckpointError, match=f"{name} is not listed in MANIFEST.json") as caught:
            find_model(model).tokenizer()
        assert "tokenizer_name=DIR" in caught.value.fix
        assert "delete MANIFEST.json" in caught.value.fix
        row.hits += 1


def test_a_note_beside_a_published_model_changes_nothing_and_is_not_spoken_of(model, warnings):
    (model / "README.md").write_text("mine")
    (model / "notes").mkdir()
    (model / "notes" / "config.json").write_text("mine")
    assert load(model)[1] is not None
    assert not warnings


def test_another_programs_manifest_vouches_for_nothing_and_forbids_nothing(model):
    for content in ('{"name": "a game"}', '{\n "name": "a game"\n}', "a list of things", "[]", "{}", '{"forma'):
        (model / MANIFEST).write_text(content)
        assert load(model)[1] is not None


def test_a_manifest_of_ours_that_is_cut_short_or_empty_is_refused(model):
    raw = (model / MANIFEST).read_bytes()
    for left in (*(raw[:size] for size in (*range(16), len(raw) // 2)), b"\n", bytes(len(raw))):
        (model / MANIFEST).write_bytes(left)
        for reader in (load, check_published):
            with pytest.raises(CheckpointError, match=r"MANIFEST.json is cut short or damaged") as caught:
                reader(model)
            assert caught.value.where == str(model / MANIFEST), left


def test_a_resume_reads_no_planted_state_of_the_optimiser_and_the_folder_is_kept(sound, tmp_path, warnings, capsys):
    with fault("P4", "optimiser files, a probe and an index put into a checkpoint that a run goes on from") as row:
        place = Place(tmp_path / "place")
        shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache"))
        point = place.run / "checkpoint-2"
        names = set(TensorFiles.of_stem(point, "optimizer").files)
        row.count = 3
        whole = (point / "optimizer.safetensors").is_file()
        planted = "optimizer-00009-of-00009.safetensors" if whole else "optimizer.safetensors"
        save_file({"evil": torch.zeros(1)}, point / planted)
        (point / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"evil": planted}}))
        (point / "added_tokens.json").write_text("{}")
        row.hits = 3
        assert set(TensorFiles.of_stem(point, "optimizer").files) == names
        CheckpointManager(place.run).verify(point)
        assert any("model.safetensors.index.json is not listed" in text for text in warnings)
        assert any(f"{planted} is not listed" in text for text in warnings)
        assert main(words_of("resume", place)) == 0, capsys.readouterr().err
        discard_unchanged(point)
        assert (point / planted).exists(), "rotation keeps what others put there"
