"""`erniekit data` and its three commands: their help lists what they take, and they take what it lists."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.commands import COMMANDS
from erniekit.cli.help import help_lines
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.flat import KEYS
from erniekit.data import index_command
from erniekit.data.clean import clean_parser
from erniekit.data.formats import FORMATS
from erniekit.data.inspect import KEYS_TAKEN, data_parser
from erniekit.recipes.preview import KEYS_READ, preview, preview_parser
from support.jsonl import write_jsonl


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def printed(capsys: pytest.CaptureFixture, *words: str) -> str:
    with pytest.raises(SystemExit) as done:
        main(list(words))
    assert done.value.code == 0
    return capsys.readouterr().out


def test_the_help_of_data_lists_its_flags_and_formats_and_no_key_it_does_not_take() -> None:
    lines = help_lines(["data"])
    parts = [f"data {name}" for name, _ in COMMANDS["data"].parts]
    own = "\n".join(line for line in lines if not any(part in line for part in parts))
    assert set(re.findall(r"--\w+", own)) == flags(data_parser()) - {f"--{key}" for key in KEYS_TAKEN} | {
        "--columns",
        "--stage",
    }
    for format in FORMATS:
        assert format in own
    others = KEYS.keys() - {"format"}  # of export; a word of this help as well
    assert {key for key in others if re.search(rf"\b{key}\b", own)} == set(KEYS_TAKEN)


def test_the_help_of_data_names_its_commands_and_what_they_need() -> None:
    text = "\n".join(help_lines(["data"]))
    for name, _ in COMMANDS["data"].parts:
        assert f"erniekit data {name} " in text
    needed = {a.option_strings[0] for a in index_command._parser()._actions if a.required and a.option_strings}
    assert needed == {"--model_name_or_path", "--output"}
    for flag in needed:
        assert flag in text


def test_the_help_of_each_command_lists_every_flag_it_takes(capsys: pytest.CaptureFixture) -> None:
    for name, parser in (("preview", preview_parser()), ("index", index_command._parser()), ("clean", clean_parser())):
        text = printed(capsys, "data", name, "--help")
        assert flags(parser) <= set(re.findall(r"--[\w-]+", text))
        assert printed(capsys, "help", "data", name) == text
        assert printed(capsys, "data", "--help", name) == text


class Spy:
    """A config that notes which keys are read."""

    def __init__(self, cfg: Any, seen: set[str]) -> None:
        self._cfg, self._seen = cfg, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cfg, name)
        if name in KEYS:
            self._seen.add(name)
            return value
        return value if callable(value) else Spy(value, self._seen)

    def __getitem__(self, name: str) -> Any:
        self._seen.add(name)
        return self._cfg[name]


def test_the_help_of_preview_lists_the_keys_that_decide_what_is_shown(
    capsys: pytest.CaptureFixture, paddle: Path, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(paddle / "tokenizer", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    text = printed(capsys, "data", "preview", "--help")
    listed = re.findall(r"^  (\w+) +\S", text[text.index("keys that decide") :], flags=re.MULTILINE)
    assert tuple(listed) == KEYS_READ
    seen: set[str] = set()
    files = {"SFT": "sft-train.jsonl", "DPO": "dpo-train.jsonl", "PT": "pretrain.jsonl", "CLS": "classify-train.jsonl"}
    for stage, file in files.items():
        for model in ("tokenizer_name", "model_name_or_path"):
            words = [str(root / "examples/data" / file), f"{model}={tmp_path / 'model'}", f"stage={stage}"]
            preview(Spy(load(words, "data"), seen), 0, 1)  # type: ignore[arg-type]
    assert seen == set(KEYS_READ)


def test_every_key_and_flag_that_preview_lists_is_taken(
    capsys: pytest.CaptureFixture, paddle: Path, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"src": [f"q{i}"], "tgt": ["the quiet river"]} for i in range(3)])
    given = {
        "train_dataset_path": str(file), "train_dataset_type": "erniekit", "stage": "SFT", "compat": "erniekit",
        "model_name_or_path": "not looked at", "tokenizer_name": str(paddle / "tokenizer"),
        "download_hub": "huggingface", "max_seq_len": "64", "overlong": "truncate", "train_thinking": "mask",
        "max_prompt_len": "32",
        "mask_out_eos_token": "True", "columns": "{src: src}", "class_labels": "a,b",
    }  # fmt: skip
    assert set(given) == set(KEYS_READ)
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert main(["data", "preview", *words, "--from", "1", "--rows", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["line"] == 2


def test_data_takes_its_flags_and_keys_and_refuses_others(
    capsys: pytest.CaptureFixture, paddle: Path, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"src": ["q"], "tgt": ["a"]}])
    assert main(["data", str(file), "--type", "erniekit"]) == 0
    assert "as given" in capsys.readouterr().out
    given = {
        "stage": "SFT",
        "train_dataset_type": "erniekit",
        "max_seq_len": "64",
        "model_name_or_path": str(paddle / "tokenizer"),
    }
    assert given.keys() == set(KEYS_TAKEN) - {"columns"}
    assert main(["data", str(file), "columns.src=src", *(f"{name}={value}" for name, value in given.items())]) == 0
    assert main(["data", str(file), *(word for name, value in given.items() for word in (f"--{name}", value))]) == 0
    assert main(["data", str(file), "--overlong", "drop"]) == 2
    assert "error: unrecognized arguments: --overlong" in capsys.readouterr().err
