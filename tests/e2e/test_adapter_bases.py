"""An adapter and its base: found from anywhere, refused when it is another model, and with the tokenizer it was trained
with, whichever command opens it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import erniekit
from erniekit.api_load import find_model
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.cli.main import main
from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import CheckpointError, ConfigError
from erniekit.serve.folder import stop_ids
from erniekit.serve.loaded_models import find_models, load_models

PROMPT = ("--prompt", "hello", "temperature=0", "max_new_tokens=4", "max_model_len=128")
QUICK = dict(fine_tuning="LoRA", learning_rate=5e-2, max_steps=2, doctor="off")


@pytest.fixture
def project(train: Callable, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models/tiny and a LoRA run `run` on it, started here by relative paths; the tests then look from elsewhere."""
    folder = tmp_path / "project"
    shutil.copytree(tiny_model, folder / "models" / "tiny")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    train(Path("run"), model_name_or_path="models/tiny", **QUICK)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def change(base: Path) -> None:
    """The same shapes and names, other weights: a later checkpoint of the base put in its place."""
    folder = ModelFolder(base)
    model = folder.build()
    with torch.no_grad():
        model.layers[0].attn.out.weight.mul_(1.5)
    for file in base.glob("model*.safetensors*"):
        file.unlink()
    write_model(base, folder.config, model.state_dict().__getitem__, layout=folder.layout)


def evaluated(rows: Path, *words: str) -> int:
    quick = ["batch_size=1", "max_evaluate_steps=1", "max_seq_len=96", "device=cpu", "eval_dataset_type=erniekit"]
    return main(["eval", *words, f"eval_dataset_path={rows}", *quick])


def test_an_adapter_trained_by_relative_paths_is_opened_from_elsewhere(
    project: Path, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = project / "run", project / "models" / "tiny"
    assert json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert main(["chat", str(run), *PROMPT]) == 0
    assert evaluated(rows, str(run), "output_dir=evaluation") == 0
    assert main(["export", str(run)]) == 0
    peft = pytest.importorskip("peft")
    assert peft.PeftConfig.from_pretrained(str(run)).base_model_name_or_path == str(base)


def test_paddles_form_and_a_base_behind_a_link_are_stored_as_lasting_paths(
    train: Callable, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "current").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    train(Path("run"), model_name_or_path="current", save_format="paddle", **QUICK)
    config = json.loads((tmp_path / "run" / "lora_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model.resolve())


def test_a_hub_id_is_stored_as_one(
    train: Callable, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    shutil.copytree(tiny_model, snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    train(tmp_path / "run", model_name_or_path="someone/tiny", **QUICK)
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/tiny"
    erniekit.load(tmp_path / "run")


def test_a_base_that_moved_is_named_with_the_key_that_finds_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project / "run"
    (project / "models").rename(project / "moved")
    assert main(["chat", str(run), *PROMPT]) == 2
    error = capsys.readouterr().err
    assert str(project / "models" / "tiny") in error
    assert f"lora_path={run} model_name_or_path=DIR" in error
    assert "download" not in error
    assert main(["chat", f"lora_path={run}", f"model_name_or_path={project / 'moved' / 'tiny'}", *PROMPT]) == 0


def test_every_command_refuses_a_changed_base_and_takes_it_when_asked_to(
    project: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = project / "run", project / "models" / "tiny"
    words = {
        "chat": lambda *more: main(["chat", str(run), *PROMPT, *more]),
        "eval": lambda *more: evaluated(rows, str(run), "output_dir=evaluation", *more),
        "export": lambda *more: main(["export", str(run), *more]),
        "merge": lambda *more: main(["export", str(base), f"lora_path={run}", "output_dir=merged", *more]),
        "given": lambda *more: main(["chat", f"model_name_or_path={base}", f"lora_path={run}", *PROMPT, *more]),
    }
    for name, command in words.items():
        assert command() == 0, name
    change(base)
    capsys.readouterr()
    for name, command in words.items():
        assert command() == 2, name
        error = capsys.readouterr().err
        assert "fix:" in error, name
        assert str(base) in error, name
        assert command("override_base=True") == 0, name
        capsys.readouterr()
    with pytest.raises(CheckpointError, match="trained on another model") as caught:
        erniekit.load(run)
    assert str(run) in caught.value.where
    erniekit.load(run, override_base=True)


def test_a_served_adapter_is_checked_like_an_opened_one(project: Path) -> None:
    from erniekit.config import load as load_config

    run, base = project / "run", project / "models" / "tiny"
    words = [str(base), f"lora_modules=mine={run}", "max_model_len=64", "max_num_seqs=1", "device=cpu"]
    load_models(cfg := load_config(words, "server"), find_models(cfg)).engine.stop()
    change(base)
    with pytest.raises(CheckpointError, match="trained on another model"):
        load_models(cfg, find_models(cfg))
    load_models(cfg := load_config([*words, "override_base=True"], "server"), find_models(cfg)).engine.stop()


def test_eval_takes_the_adapter_of_lora_path_and_a_typed_folder_over_an_old_result(
    project: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = project / "run", project / "models" / "tiny"

    def loss(*words: str) -> float:
        assert evaluated(rows, *words, "overwrite_output_dir=True") == 0
        return float(json.loads((Path.cwd() / "result" / "eval_results.json").read_text())["eval_loss"])

    plain, adapted = loss(str(base), "output_dir=result"), loss(str(run), "output_dir=result")
    assert plain != adapted
    assert loss(f"model_name_or_path={base}", f"lora_path={run}", "output_dir=result") == adapted
    assert loss(str(base), f"lora_path={run}", "output_dir=result") == adapted
    assert evaluated(rows, str(base), f"lora_path={project / 'none'}", "output_dir=result") == 2
    assert "there is no adapter" in capsys.readouterr().err
    shutil.copytree(run, Path.cwd() / "output")  # the default output_dir of an earlier run
    assert evaluated(rows, str(base)) == 0
    assert f"model    {base}\n" in capsys.readouterr().out


def test_a_run_with_a_tokenizer_of_its_own_is_opened_and_exported_with_it(
    train: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in tiny_model.iterdir():
        if "token" in file.name:
            shutil.copyfile(file, other / file.name)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    (other / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_tokenizer(tiny_model).chat_template != config["chat_template"]
    run = tmp_path / "run"
    train(run, tokenizer_name=other, **QUICK)
    assert main(["export", str(run)]) == 0
    for folder in (run, run / "checkpoint-2", run / "export"):
        assert erniekit.load(folder)[1].chat_template == config["chat_template"], folder
        assert 9 in stop_ids(find_model(folder)), folder
    train(tmp_path / "full", tokenizer_name=other, max_steps=1, doctor="off")
    assert main(["split", str(tmp_path / "full")]) == 0
    for folder in (tmp_path / "full", tmp_path / "full" / "split_export"):
        assert erniekit.load(folder)[1].chat_template == config["chat_template"], folder
        assert 9 in stop_ids(find_model(folder)), folder


def test_training_on_from_an_adapter_refuses_another_base(
    project: Path, train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = project / "run", project / "models" / "tiny"
    from erniekit.checkpoint.identity import model_identity, write_base

    write_base(run, model_identity(base), str(base))
    more = dict(model_name_or_path=base, lora_path=run, **QUICK)
    with pytest.raises(ConfigError, match="lora_path"):  # into what it starts from
        train(run, **more)
    train(tmp_path / "more", **more)
    change(base)
    with pytest.raises(CheckpointError, match="trained on another model"):
        train(tmp_path / "other", **more)
    train(tmp_path / "other", override_base=True, **more)
