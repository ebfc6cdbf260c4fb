"""Tab completion: the candidates themselves, and what the three shells make of them as somebody types."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from erniekit.cli.commands import COMMANDS
from erniekit.cli.completion import complete
from erniekit.cli.main import main
from erniekit.config.flat import KEYS


def words(*typed: str) -> list[str]:
    return [word for word, _ in complete(list(typed))]


def test_a_first_word_becomes_any_command():
    assert words("") == list(COMMANDS)
    assert words("ex") == ["export"]
    assert words("help", "qu") == ["quantize"]
    assert words("nothing", "") == []


def test_keys_come_as_flags_and_as_words_with_their_help():
    assert words("train", "--max_ste") == ["--max_steps"]
    assert complete(["train", "max_ste"]) == [("max_steps=", KEYS["max_steps"].help)]
    assert {f"--{k.name}" for k in KEYS.values() if not k.not_yet} <= set(words("train", "--"))
    assert words("plan", "--clus") == ["--cluster"]
    assert words("webui", "--") == ["--runs", "--no-token", "--help"]
    assert words("train", "--help", "lora_ra") == ["lora_rank"]


def test_values_are_those_the_key_declares():
    assert words("train", "stage=D") == ["stage=DPO"]
    assert words("train", "--stage", "D") == ["DPO"]
    assert words("train", "recompute=") == ["recompute=True", "recompute=False"]
    assert words("train", "report_to=tensorboard,wa") == ["report_to=tensorboard,wandb"]
    assert words("train", "--recompute", "max_ste") == ["max_steps="]  # a switch takes no value


def test_paths_are_folders_and_what_the_command_or_the_key_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("mine.yaml", "rows.jsonl", "notes.txt", ".hidden.yaml", "runs/deep.yaml"):
        (tmp_path / name).touch()
    assert [w for w in words("train", "") if not w.endswith("=")] == ["mine.yaml", "runs/"]
    assert words("train", "runs/") == ["runs/deep.yaml"]
    assert words("train", "--data", "r") == ["rows.jsonl", "runs/"]
    assert words("train", "output_dir=") == ["output_dir=runs/"]
    assert words("data", "ro") == ["rows.jsonl"]
    assert words("train", "missing/") == []


def test_shipped_recipes_are_completed_by_name():
    assert "ERNIE-4.5-0.3B/run_chat" in words("recipes", "ERNIE-4.5-0.3B/run_c")


def test_an_unknown_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "tcsh"]) == 2
    assert "bash, zsh or fish" in capsys.readouterr().err


# ---- in the shells themselves


@pytest.fixture(scope="module")
def typing_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An `erniekit` on the path that completes and otherwise says what it was called with; a home without settings."""
    folder = tmp_path_factory.mktemp("shell")
    program = folder / "erniekit"
    ours = f'[ "$1" = completion ] && exec "{sys.executable}" -m erniekit "$@"'
    program.write_text(f'#!/bin/sh\n{ours}\necho called: "$@"\n')
    program.chmod(0o755)
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(folder), "TERM": "dumb", "PS1": "> ", "INPUTRC": "/dev/null"}


def installed(shell: str) -> str:
    found = shutil.which(shell)
    if not found:
        pytest.skip(f"{shell} is not installed here")
    return found


def typed(command: list[str], env: dict[str, str], lines: list[str], wanted: str) -> str:
    """The screen of an interactive shell in which the lines were typed, once `wanted` is on it."""
    pid, screen = pty.fork()
    if not pid:
        os.chdir(env["HOME"])
        os.execve(command[0], command, env)
    seen, end = "", time.monotonic() + 60
    try:
        for line in lines:
            os.write(screen, line.encode())
            time.sleep(0.3)
        while wanted not in seen and time.monotonic() < end:
            if select.select([screen], [], [], 0.2)[0]:
                seen += os.read(screen, 4096).decode(errors="replace").replace("\r", "")
        return seen
    finally:
        os.close(screen)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_command_key_and_value_as_typed(shell: str, typing_env: dict[str, str]):
    command = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    lines = [f'eval "$(erniekit completion {shell})"\n', "erniekit tra\tstag\tDP\t\n"]
    wanted = "called: train stage=DPO"
    assert wanted in typed([installed(shell), *command], typing_env, lines, wanted)


def test_fish_offers_command_key_and_value_with_their_help(typing_env: dict[str, str]):
    asked = "; ".join(f'complete -C "erniekit {line}"' for line in ("tra", "train --max_ste", "train stage=DP"))
    script = f"erniekit completion fish | source; {asked}"
    done = subprocess.run(
        [installed("fish"), "--no-config", "-c", script],
        env=typing_env, cwd=typing_env["HOME"], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert found[0][:2] == ["train", COMMANDS["train"].about]
    assert [parts[0] for parts in found[1:]] == ["--max_steps", "stage=DPO"], done.stderr
