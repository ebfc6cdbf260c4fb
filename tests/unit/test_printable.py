"""Messages may quote files and rows of strangers: what reaches a terminal is text."""

from __future__ import annotations

import pytest

from erniekit.data.inspect import data_command
from erniekit.data.types import RowProblem
from erniekit.errors import DataError
from erniekit.log import emit, paint, warn
from erniekit.printable import counted, every, plain, public
from support.jsonl import write_jsonl

HOSTILE = "media/\x1b[2J\x1b]0;owned\x07x\r\x9b1m\u202e\ud800.png"


def is_plain(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_what_a_terminal_would_obey_is_escaped_and_a_long_text_loses_its_middle() -> None:
    assert is_plain(plain(HOSTILE))
    assert plain("a\nb") == "a\\nb"
    assert plain("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
    long = plain("/" + "deep/" * 1000 + "a.png")
    assert len(long) == 1000
    assert long.endswith("/a.png")


def test_errors_rows_and_lines_are_plain_and_keep_our_own_lines_and_colours(capsys: pytest.CaptureFixture[str]) -> None:
    error = DataError(HOSTILE, where=f"one\n{HOSTILE}", fix="/" * 5000)
    problem = RowProblem("a.jsonl", 1, "missing_media", f"{HOSTILE}\n" * 1000)
    emit(f"{paint('file', 'bold', on=True)}: {HOSTILE}\n  next line")
    warn(HOSTILE)
    told = capsys.readouterr()
    assert told.out.startswith("\x1b[1mfile\x1b[0m: media/\\x1b[2J")
    assert told.out.endswith("\n  next line\n")
    shown = told.out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert all(map(is_plain, (str(error), problem.reason, shown, told.err)))
    assert "\n" not in problem.reason
    assert len(problem.reason) <= 400
    assert error.where.count("\n") == 1


def test_the_names_of_fields_and_files_in_a_dataset_cannot_forge_lines(tmp_path, capsys) -> None:
    row = {"src": ["q"], "tgt": ["a"], "\x1b]0;owned\x07\u202e\nall is well": 1}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, {**row, "src": 5, "\x1b[2J\nfine": 1}])
    data_command([str(path)])
    out = capsys.readouterr().out
    assert is_plain(out)
    assert "\nall is well" not in out


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:sesame@host/a.jsonl", "https://***@host/a.jsonl"),
        ("https://token@host/a.jsonl", "https://***@host/a.jsonl"),
        ("abfs://container@account.net/a.jsonl", "abfs://container@account.net/a.jsonl"),
        ("https://h/a?X-Amz-Date=1&X-Amz-Signature=abc&versionId=7", "https://h/a?versionId=7&***"),
        ("https://h/a?sv=2024&se=9&sp=r&sig=abc%3D", "https://h/a?***"),
        ("https://h/a?se=9&split=train", "https://h/a?se=9&split=train"),
        ("https://h/a?access_token=abc", "https://h/a?***"),
        ("https://me:p@ss@host/a", "https://***@host/a"),
        ("https://h/a,https://me:word@h/b?sig=1,s3://b/c?x=2", "https://h/a,https://***@h/b?***,s3://b/c?x=2"),
        ("https://h/a?page=2&max_tokens=3", "https://h/a?page=2&max_tokens=3"),
        ("hf:owner/name?split=train&revision=key", "hf:owner/name?split=train&revision=key"),
        ("no address, token=abc", "no address, token=abc"),
    ],
)
def test_addresses_are_shown_without_what_lets_their_holder_in(address: str, shown: str) -> None:
    assert public(f"look at {address} now") == f"look at {shown} now"
    assert public(public(address)) == public(address)
    assert str(DataError("no", where=address)).endswith(shown)


def test_one_of_a_thing_is_no_plural():
    assert [counted(n, "step") for n in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert [counted(n, "file is", "files are") for n in (1, 2)] == ["1 file is", "2 files are"]
    assert [every(n, "minute") for n in (1, 0.5, 15, 1000)] == [
        "every minute", "every 0.5 minutes", "every 15 minutes", "every 1,000 minutes",
    ]  # fmt: skip
