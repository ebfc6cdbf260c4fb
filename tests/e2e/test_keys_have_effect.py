"""Every key that a command's help or a form of the web page offers is read when the command runs: none is taken and
ignored."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.cli.commands import COMMANDS
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.flat import KEYS
from erniekit.config.run import RunConfig
from erniekit.config.sections import SECTIONS
from erniekit.export.plan import READ
from erniekit.serve import server
from erniekit.serve.loaded_models import find_models, load_models
from erniekit.webui.forms import form

# Read under another name: a rule hands the value on.
HANDED_ON = {"batch_size": "per_device_eval_batch_size"}
PASSING = ("/config/", "/dataclasses.py")  # code that passes every value on and looks at none


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys whose value, or whether it was given, code outside config/ asked for."""
    names: set[str] = set()

    def note(name: str) -> None:
        caller = sys._getframe(2).f_code.co_filename
        if name in KEYS and not any(part in caller for part in PASSING):
            names.add(name)

    def attribute(section: object, name: str) -> object:
        note(name)
        return object.__getattribute__(section, name)

    for cls in SECTIONS.values():
        monkeypatch.setattr(cls, "__getattribute__", attribute)

    def watched(original: Callable) -> Callable:
        def asked(cfg: RunConfig, name: str) -> object:
            note(name)
            return original(cfg, name)

        return asked

    for method in ("given", "typed", "origin", "__getitem__"):
        monkeypatch.setattr(RunConfig, method, watched(getattr(RunConfig, method)))
    chosen = RunConfig.compute_type_given.fget  # of two keys: its own and bf16
    assert chosen is not None

    def of_compute_type(cfg: RunConfig) -> bool:
        note("compute_type")
        return chosen(cfg)

    monkeypatch.setattr(RunConfig, "compute_type_given", property(of_compute_type))
    return names


def export(base: Path, run: Path, rows: Path, out: Path) -> None:
    assert main(["export", str(run)]) == 0


def split(base: Path, run: Path, rows: Path, out: Path) -> None:
    assert main(["split", f"model_name_or_path={base}", f"output_dir={out}"]) == 0


def evaluate(base: Path, run: Path, rows: Path, out: Path) -> None:
    words = [f"eval_dataset_path={rows}", "eval_dataset_type=erniekit", "max_seq_len=96", "max_evaluate_steps=1"]
    assert main(["eval", str(run), *words, "batch_size=1", "device=cpu", f"output_dir={out}"]) == 0


def chat(base: Path, run: Path, rows: Path, out: Path) -> None:
    words = ["max_new_tokens=2", "max_model_len=64", "device=cpu"]
    assert main(["chat", str(run), "--prompt", "hello", *words]) == 0


def serve(base: Path, run: Path, rows: Path, out: Path) -> None:
    """All of `erniekit server` but the listening."""
    cfg = load([str(run), "max_model_len=64", "max_num_seqs=1", "device=cpu", "port=0"], "server")
    key = server.read_key(cfg)
    server.check_address(cfg, key)
    assert server.choose_engine(cfg) == "transformers"
    server.bind(cfg.serve.host, cfg.serve.port).close()
    loaded = load_models(cfg, find_models(cfg))
    server.make_application(cfg, loaded, key)
    loaded.engine.stop()


def quantize(base: Path, run: Path, rows: Path, out: Path) -> None:
    words = [f"train_dataset_path={rows}", "calibration_rows=4", "max_seq_len=96", "device=cpu"]
    assert main(["quantize", str(base), "quant=w4a16", f"output_dir={out}", *words]) == 0


RUNS = {"export": export, "split": split, "quantize": quantize, "eval": evaluate, "chat": chat, "server": serve}
PAGES = {"export": "export", "split": "split", "evaluate": "eval", "chat": "server"}
# Only met under a condition the run here does not have: asked for on the way to it.
ELSEWHERE = {"server": {"allow_unauthenticated"}}  # read where `host` lets other machines in


@pytest.mark.parametrize("command", RUNS)
def test_every_key_a_command_or_its_form_offers_is_read(
    command: str, read: set[str], train: Callable, tiny_model: Path, rows: Path, tmp_path: Path
) -> None:
    train(tmp_path / "run", fine_tuning="LoRA", max_steps=1, doctor="off")
    read.clear()
    RUNS[command](tiny_model, tmp_path / "run", rows, tmp_path / "out")
    entries = set(COMMANDS[command].keys)
    for page in (page for page, word in PAGES.items() if word == command):
        entries |= {field.key for field in form(page).fields}
    ignored = {key for key in entries if HANDED_ON.get(key, key) not in read} - ELSEWHERE.get(command, set())
    assert ignored == set()


def test_the_watch_notices_a_key_that_is_not_read(read: set[str], tiny_model: Path, tmp_path: Path) -> None:
    split(tiny_model, tiny_model, tmp_path, tmp_path / "out")
    assert {"output_dir", "max_shard_size"} <= read
    assert not {"learning_rate", "lora_rank", "probe_tokens"} & read


def test_a_typed_key_that_export_or_split_does_not_read_is_told(
    read: set[str], train: Callable, tiny_model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", fine_tuning="LoRA", max_steps=1, doctor="off")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: {tmp_path / 'run'}\nlearning_rate: 1e-4\ncompute_type: bf16\n")
    assert main(["export", str(recipe)]) == 0
    assert "without effect" not in capsys.readouterr().out  # a recipe is for every command
    assert main(["export", str(recipe), "compute_type=bf16", "device=cpu", "lora=True"]) == 0
    assert "without effect on export: device, compute_type (" in capsys.readouterr().out
    read.clear()
    export(tiny_model, tmp_path / "run", rows, tmp_path / "out")
    split(tiny_model, tmp_path / "run", rows, tmp_path / "out")
    assert (READ & read) | {"lora", "fine_tuning"} == READ  # what is not told is read


def test_every_command_with_keys_of_its_own_is_walked() -> None:
    own = {name for name, command in COMMANDS.items() if command.keys}
    # Two say themselves which words they take; plan and rehearse show what training would do with its keys.
    assert own - {"demo", "data", "plan", "rehearse"} == set(RUNS)
