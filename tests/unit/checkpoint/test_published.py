"""A model that erniekit saved is used only while its files are those that were saved."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.api_load import find_model, load
from erniekit.checkpoint import manifest, probe, published
from erniekit.checkpoint.final_model import publish_model
from erniekit.checkpoint.manifest import MANIFEST
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.published import check_answer, check_checkpoint, check_published
from erniekit.checkpoint.writer import publish
from erniekit.cli.main import main
from erniekit.config import load as load_config
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import CheckpointError
from erniekit.files import OwnedFiles
from erniekit.files.record import RECORD
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models import score_head
from erniekit.serve.engines import EXTERNAL
from erniekit.serve.engines.external import make_target
from erniekit.serve.loaded_models import find_models
from support.clock import until

WEIGHTS = "model.safetensors"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished run: checkpoint-4 with its probe, and the final model."""

    def write(folder: Path) -> None:
        make_tiny_model(folder)
        ids = torch.arange(40, 56)[None]
        with torch.no_grad():
            model = ModelFolder(folder).build().eval()
            probe.save(folder, probe.measure(model, probe.Probe(ids, ids.roll(-1)), "cpu/float32"))
        (folder / "optimizer.safetensors").write_text("moments")

    output = OwnedFiles(tmp_path / "run").open("run").folder
    publish_model(publish(output, "checkpoint-4", write), output)
    return output


def overwrite(file: Path, size: int = 1000) -> None:
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x5a" * size)


@pytest.mark.parametrize("place", ["checkpoint-4", "."])
def test_overwritten_weights_are_refused_with_a_way_out(output: Path, place: str) -> None:
    folder = output / place
    load(folder)
    overwrite(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"is damaged: model\.safetensors does not match its sha256") as error:
        load(folder)
    assert error.value.where == str(folder / WEIGHTS)
    assert "use a" in error.value.fix
    assert "if you changed it" in error.value.fix


@pytest.mark.parametrize("damage", ["weights", "weights, and no byte left of the manifest"])
def test_a_damaged_copy_is_refused_by_every_command(
    damage: str, output: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = shutil.copytree(output / "checkpoint-4", tmp_path / "dmg")
    overwrite(damaged / WEIGHTS)
    expected = "dmg is damaged: model.safetensors does not match its sha256"
    if damage != "weights":
        (damaged / MANIFEST).write_bytes(b"")
        expected = f"{MANIFEST} is cut short or damaged"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"src": ["one"], "tgt": ["two"]}\n' * 4)
    for words in (
        ["eval", "dmg", f"eval_dataset_path={rows}"],
        ["chat", "dmg", "--prompt", "one"],
        ["server", "dmg", "port=0"],
        ["export", "dmg"],
        ["quantize", "model_name_or_path=dmg", "output_dir=small", "quant=w8a16"],
        ["train", "model_name_or_path=dmg", f"data={rows}", "output_dir=new", "max_steps=1"],
        ["train", "model_name_or_path=dmg", f"data={rows}", "output_dir=dpo", "max_steps=1", "stage=DPO"],
    ):
        assert main(words) == 2, words
        said = capsys.readouterr()
        assert expected in said.err + said.out, words
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "dmg", "rows.jsonl", "eval"}


def test_weights_as_large_as_the_largest_that_have_no_sample_are_read_whole(output: Path, monkeypatch) -> None:
    folder = output / "checkpoint-4"
    monkeypatch.setattr(published, "SAMPLED_ABOVE", (folder / WEIGHTS).stat().st_size)
    overwrite(folder / WEIGHTS)
    monkeypatch.setattr(manifest, "_FULL_BELOW", 0)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its sha256"):
        check_published(folder)


def test_optimiser_states_and_sampling_settings_are_no_part_of_the_model(output: Path) -> None:
    folder = output / "checkpoint-4"
    (folder / "optimizer.safetensors").write_text("other")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    load(folder)


def test_an_edited_config_is_used_and_warned_of(output: Path, capsys) -> None:
    config = output / "checkpoint-4" / "config.json"
    assert check_published(config.parent) == (True, ())
    config.write_text(config.read_text().rstrip() + "\n\n")
    load(config.parent)
    assert ModelFolder(config.parent).edited == ("config.json",)  # an error names it without reading the files again
    assert f"{config} is not as it was saved: it was edited, or is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("with_manifest", [True, False])
def test_what_git_left_in_a_large_files_place_is_called_by_its_name(output: Path, with_manifest: bool) -> None:
    folder = output / "checkpoint-4"
    size, digest = (folder / WEIGHTS).stat().st_size, "ab" * 32
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"
    (folder / WEIGHTS).write_text(pointer)
    if not with_manifest:
        (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a git-lfs pointer") as error:
        load(folder)
    assert error.value.fix == f"git lfs install; then git lfs pull in {folder}"


def test_a_tokenizer_that_was_left_out_is_warned_of_and_another_may_be_used(output: Path, capsys) -> None:
    lost = output / "checkpoint-4" / "tokenizer.model"
    lost.unlink()
    assert find_model(lost.parent).tokenizer(output)
    assert f"{lost} is missing: it was there when the model was saved" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        find_model(lost.parent).tokenizer()


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
@pytest.mark.parametrize("what", ["a pipe", "a device", "too large"])
def test_a_setting_that_is_no_text_of_a_person_is_damage_and_no_wait(name: str, what: str, tmp_path: Path) -> None:
    folder = publish(tmp_path, "checkpoint-4", lambda folder: (folder / name).write_text("{}") and None)
    (folder / name).unlink()
    if what == "a pipe":
        os.mkfifo(folder / name)
    elif what == "a device":
        (folder / name).symlink_to("/dev/zero")
    else:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    told: list[str] = []

    def check() -> None:
        with pytest.raises(CheckpointError) as error:
            check_checkpoint(folder, "full")
        told.append(error.value.what)

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    until(lambda: told or not thread.is_alive(), "the check to end")
    assert name in told[0]


def test_an_edited_manifest_is_refused_with_a_way_out(output: Path) -> None:
    file = output / "checkpoint-4" / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text())))
    with pytest.raises(CheckpointError, match=f"is damaged: {MANIFEST}") as error:
        load(file.parent)
    assert f"delete {MANIFEST}" in error.value.fix
    file.unlink()
    load(file.parent)


def test_a_folder_without_its_manifest_is_read_as_it_is(output: Path) -> None:
    folder = output / "checkpoint-4"
    overwrite(folder / WEIGHTS)
    (folder / MANIFEST).unlink()
    load(folder)


@pytest.mark.parametrize("left", [b"", b"\0" * 40])
def test_an_output_dir_whose_record_was_emptied_is_warned_of(left: bytes, output: Path, capsys) -> None:
    check_published(output)
    assert RECORD not in capsys.readouterr().err
    (output / RECORD).write_bytes(left)
    check_published(output)
    assert f"{output / RECORD} is empty or damaged" in capsys.readouterr().err


def test_what_was_set_aside_as_damaged_is_compared_again(output: Path, capsys) -> None:
    aside = (output / "checkpoint-4").rename(output / "checkpoint-4.corrupt-1")
    load(aside)
    assert "was set aside as damaged; the files of its model are whole" in capsys.readouterr().err
    overwrite(aside / WEIGHTS)
    with pytest.raises(CheckpointError, match="is damaged"):
        find_model(aside, verify="size")
    (aside / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="was set aside as damaged"):
        load(aside)


def test_verify_size_compares_sizes(output: Path) -> None:
    folder = output / "checkpoint-4"
    overwrite(folder / WEIGHTS)
    find_model(folder, verify="size")
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="bytes"):
        find_model(folder, verify="size")


@pytest.fixture
def large(monkeypatch) -> list[str]:
    """Any model counts as large, and a sampled check reads its samples; the names of files that are read."""
    monkeypatch.setattr(published, "_PROBED_ABOVE", 0)
    monkeypatch.setattr(published, "SAMPLED_ABOVE", 0)
    read: list[str] = []
    check = published.manifest.check_content
    monkeypatch.setattr(
        published.manifest, "check_content", lambda path, *rest: (read.append(path.name), check(path, *rest))
    )
    return read


def test_a_large_model_whose_weights_are_packed_is_compared_though_its_probe_tells_nothing(
    output: Path, large: list[str]
) -> None:
    for place in (output, output / "checkpoint-4"):
        overwrite(place / WEIGHTS)
        found = find_model(place)
        assert WEIGHTS not in large
        with pytest.raises(CheckpointError, match="is damaged: model"):
            found.build(packed="int8")
        find_model(place, verify="size").build(packed="int8")
        large.clear()


def test_a_large_model_that_another_engine_loads_is_compared_before(output: Path, large: list[str]) -> None:
    cfg, vllm = load_config([str(output), "port=0"], "server"), EXTERNAL.get("vllm")
    make_target(cfg, vllm, None)
    overwrite(output / WEIGHTS)
    with pytest.raises(CheckpointError, match="is damaged: model"):
        make_target(cfg, vllm, None)


def test_verify_size_holds_for_adapters_too(output: Path, large: list[str], tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        model, settings = ModelFolder(output).build(), LoRASettings(2, 4.0)
        inject(model, settings, 0)
        write_adapter(folder, adapter_of(model, settings, base=str(output)), model)

    adapter = publish(OwnedFiles(tmp_path / "lora").open("run").folder, "checkpoint-4", write)
    (weights,) = adapter.glob("adapter_model*.safetensors")
    overwrite(weights, 8)
    large.clear()
    cfg = load_config([str(output), "port=0", f"lora_modules=other={adapter}", "verify=size"], "server")
    for entry in find_models(cfg):
        entry.found.build()
    assert large == []
    with pytest.raises(CheckpointError, match=r"is damaged: adapter_model\.safetensors"):
        find_model(adapter)


def test_a_model_that_was_half_replaced_when_the_run_ended_is_refused(output: Path, tmp_path: Path) -> None:
    """As a kill between two renames leaves it: each file is one that was written under its name."""

    def in_two_files(scale: float) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            make_tiny_model(folder)
            tensors = {name: scale * tensor for name, tensor in load_file(folder / WEIGHTS).items()}
            (folder / WEIGHTS).unlink()
            (folder / f"{WEIGHTS}.index.json").unlink(missing_ok=True)
            for k, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
                save_file({name: tensors[name] for name in names}, folder / f"model-0000{k}-of-00002.safetensors")

        return write

    run = OwnedFiles(tmp_path / "two").open("run").folder
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    earlier, later = publish(run, "checkpoint-2", in_two_files(1.0)), publish(run, "checkpoint-4", in_two_files(2.0))
    for checkpoint in (earlier, later):
        publish_model(checkpoint, run)
        ModelFolder(run)
    shutil.copyfile(earlier / second, run / second)
    with pytest.raises(CheckpointError, match=f"parts of two models: {second} is of an earlier one than {first}"):
        ModelFolder(run)
    shutil.copyfile(earlier / first, run / first)
    ModelFolder(run)


def test_a_model_that_was_replaced_often_is_read_once(output: Path, large: list[str], tmp_path: Path) -> None:
    checkpoint = output / "checkpoint-4"
    for scale in (1.5, 2.0, 3.0):

        def write(folder: Path, scale: float = scale) -> None:
            shutil.copytree(checkpoint, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
            save_file({n: scale * t for n, t in load_file(checkpoint / WEIGHTS).items()}, folder / WEIGHTS)

        publish_model(publish(output, f"checkpoint-{int(scale * 10)}", write), output)
    large.clear()
    ModelFolder(output)
    assert large.count(WEIGHTS) == 1


def test_below_a_score_head_a_models_own_probe_tells_nothing(output: Path, large: list[str]) -> None:
    folder = output / "checkpoint-4"
    config = json.loads((folder / "config.json").read_text())
    head = torch.zeros(3, config["hidden_size"])
    below = ModelFolder(folder, changes=score_head.changes(config, ("a", "b", "c")), head=head, verify="size")
    check_answer(folder, below.build().eval(), "size")
    assert large == []
    overwrite(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="is damaged: model"):
        check_answer(folder, below.build().eval())


def test_a_large_output_dir_has_samples_as_its_checkpoints_have(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(manifest, "SAMPLED_ABOVE", 1 << 12)
    monkeypatch.setattr(manifest, "_SAMPLE_BLOCK", 64)
    output = OwnedFiles(tmp_path / "run").open("run").folder
    publish_model(publish(output, "checkpoint-4", lambda folder: make_tiny_model(folder) and None), output)
    monkeypatch.setattr(published, "SAMPLED_ABOVE", 1 << 12)
    monkeypatch.setattr(manifest, "_FULL_BELOW", 0)
    ModelFolder(output)
    overwrite(output / WEIGHTS, 20000)
    with pytest.raises(CheckpointError, match="is damaged: model"):
        ModelFolder(output)


def test_a_file_that_changed_since_it_was_compared_is_compared_again_whatever_its_time(output: Path) -> None:
    file = output / "checkpoint-4" / WEIGHTS
    load(file.parent)
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="is damaged"):
        load(file.parent)


@pytest.mark.parametrize("place", ["checkpoint-4", "."])
def test_a_large_model_is_asked_its_probe_and_read_whole_only_if_it_answers_otherwise(
    output: Path, monkeypatch, place: str
) -> None:
    """Large here: its samples, which hold all of a file this small, are not compared."""
    folder = output / place
    monkeypatch.setattr(published, "_PROBED_ABOVE", 0)
    monkeypatch.setattr(published, "SAMPLED_ABOVE", 0)
    hashed = []
    check = published.manifest.check_content
    monkeypatch.setattr(
        published.manifest, "check_content", lambda path, *rest: (hashed.append(path.name), check(path, *rest))
    )
    load(folder)
    assert hashed == []
    overwrite(folder / WEIGHTS, 20000)
    with pytest.raises(CheckpointError, match="is damaged: model"):
        load(folder)
    assert WEIGHTS in hashed


def test_a_model_that_answers_otherwise_in_whole_files_is_warned_of(output: Path, monkeypatch, capsys) -> None:
    folder = output / "checkpoint-4"
    monkeypatch.setattr(published, "_PROBED_ABOVE", 0)
    monkeypatch.setattr(published, "SAMPLED_ABOVE", 0)
    found = find_model(folder)
    model = found.weights.build()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    found.check(model)
    said = capsys.readouterr().err
    assert "does not answer as it did when it was saved" in said
    assert "its files are those that were saved" in said
