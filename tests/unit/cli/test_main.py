"""What the person at the terminal gets back: exit codes, one clear message, and no traceback unless asked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from erniekit.cli import main as cli
from erniekit.cli.commands import COMMANDS, Command
from erniekit.errors import DataError, Preempted
from erniekit.registry import Plugin


@pytest.fixture
def command(monkeypatch):
    """Makes `erniekit probe` run the given function."""

    def install(function):
        monkeypatch.setattr(cli, "probe", function, raising=False)
        monkeypatch.setitem(COMMANDS, "probe", Command("erniekit.cli.main:probe", "x", "x", ("x",)))

    return install


def fails_with(error):
    def run(args):
        raise error

    return run


def test_no_word_prints_help(capsys):
    assert cli.main([]) == 0
    assert "erniekit train" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest_and_exits_2(capsys):
    assert cli.main(["trein"]) == 2
    err = capsys.readouterr().err
    assert "unknown command 'trein'" in err
    assert "erniekit train" in err


def test_version_prints_the_banner(capsys):
    assert cli.main(["version"]) == 0
    out = capsys.readouterr().out
    assert "Welcome to ErnieKit" in out
    assert re.search(r"version : \d", out)
    assert re.search(r"commit : (unknown|[0-9a-f]{40}(\.dirty)?)\n", out)


def test_the_command_gets_its_words_and_gives_the_exit_code(command):
    seen = []
    command(lambda args: seen.extend(args) or 7)
    assert cli.main(["probe", "a", "--b"]) == 7
    assert seen == ["a", "--b"]


def test_a_users_error_is_three_lines_and_exit_2(command, capsys):
    command(fails_with(DataError("no rows", where="a.jsonl", fix="add some")))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "error: no rows\nwhere: a.jsonl\nfix:   add some\n"


def test_preempted_is_75_and_interrupt_is_130(command, capsys):
    command(fails_with(Preempted("saved step 3")))
    assert cli.main(["probe"]) == 75
    assert "saved step 3" in capsys.readouterr().err
    command(fails_with(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130


def test_our_own_fault_is_one_line_and_a_file_with_the_traceback(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("ERNIEKIT_DEBUG", raising=False)
    command(fails_with(ZeroDivisionError("oops")))
    assert cli.main(["probe"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "ZeroDivisionError: oops" in err
    path = Path(err.split("written to ")[1].strip())
    assert "Traceback" in path.read_text()


def test_a_fault_of_a_plug_in_is_not_called_ours_and_its_traceback_is_kept(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "moon_of_a_test.py").write_text("def fail(args):\n    raise ZeroDivisionError('oops')\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = Plugin("erniekit.losses", "moon", "moon_of_a_test:fail", "moon-kit 1.0")
    command(plugin.load("loss"))
    assert cli.main(["probe"]) == 1
    error, where = capsys.readouterr().err.splitlines()
    assert error == "error: ZeroDivisionError: oops"
    said, path = where.split(", written to ")
    assert (
        said
        == f"where: {tmp_path / 'moon_of_a_test.py'}:2, of the installed package moon-kit 1.0: a fault of that code"
    )
    assert "Traceback" in Path(path).read_text()


def test_the_crash_file_holds_no_secret(command, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    command(fails_with(ZeroDivisionError("oops")))
    cli.main(["probe", "wandb_api_key=hush", "--wandb-api-key", "hush", "--seed", "3"])
    (path,) = tmp_path.iterdir()
    assert "hush" not in path.read_text()
    assert "--seed 3" in path.read_text()


def test_the_crash_file_is_written_whatever_bytes_a_path_has(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = os.fsdecode(b"run\xff")

    def fails(args):
        raise RuntimeError(f"no {path}")

    command(fails)
    assert cli.main(["probe", f"output_dir={path}"]) == 1
    (file,) = tmp_path.glob("erniekit-crash-*.txt")
    assert "output_dir=run\\udcff" in file.read_text(encoding="utf-8")
    assert str(file) in capsys.readouterr().err


def test_debug_shows_the_traceback(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("ERNIEKIT_DEBUG", "1")
    command(fails_with(ZeroDivisionError("oops")))
    assert cli.main(["probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_wins_over_the_other_words(command, capsys):
    assert cli.main(["train", "no_such_file.yaml", "-h"]) == 0
    assert "learning_rate" in capsys.readouterr().out
