"""What a package's readers and trackers do otherwise than they promise, told in their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.data.classification import ClassRow
from erniekit.data.formats import CLASS_FORMATS, reader_of
from erniekit.data.formats.fields import BadRow
from erniekit.data.formats.returned import unlike
from erniekit.data.preference import PairRules
from erniekit.data.report import BadRowsFile
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import ChatMessage, Conversation
from erniekit.errors import ConfigError, DataError
from erniekit.track import make_trackers
from support.installed import install
from support.jsonl import write_jsonl
from support.sources import open_source

HALF = "holds half of a surrogate pair, which UTF-8 cannot write"
ROWS_OF_A_PACKAGE = """
from erniekit.data.classification import ClassRow
from erniekit.data.types import ChatMessage as Said, Conversation as Talk

SAID = (Said("user", "x"), Said("assistant", "y"))
TALK = Talk(SAID)


def called(calls):
    return [Talk((Said("user", "x"), Said("assistant", "y", tool_calls=calls)))]


GIVEN = {
    "nothing": None,
    "single": TALK,
    "empty": [],
    "plain": [{"messages": []}],
    "mixed": [TALK, None],
    "undressed": [Talk(({"role": "user", "content": "x"},))],
    "number": [Talk((Said("user", 3), Said("assistant", "y")))],
    "human": [Talk((Said("human", "x"), Said("assistant", "y")))],
    "tool": called(({"name": object()},)),
    "bare tool": [Talk(SAID, (3,))],
    "keyed tool": [Talk(SAID, ({"name": "f", "of": [({1: 2},)]},))],
    "half a tool": [Talk(SAID, ({"name": "\\ud800"},))],
    "bare call": called((3,)),
    "call": called({"name": "f"}),
    "nan": called(({"name": float("nan")},)),
    "half": [Talk((Said("user", "\\ud800"), Said("assistant", "y")))],
    "half a thought": [Talk((Said("user", "x"), Said("assistant", "y", thought="\\udfff")))],
    "unused": [Talk(SAID, unused=(3,))],
}


def pick(row, compat):
    return GIVEN[row["give"]]


def leave(row, compat):
    raise SystemExit(row["code"])


def classed(row):
    return ClassRow(**row["of"])


def lazy(row, compat):
    yield TALK


def pair(row, compat):
    return TALK
"""


def test_what_a_packages_reader_gives_instead_of_rows_is_a_problem_of_the_row_in_its_name(
    site: Path, base: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(base)
    entries = {"formats": "pick = picked:pick\nlazy = picked:lazy", "preference_formats": "pick = picked:pair"}
    install(site, "pick-kit", entries, picked=ROWS_OF_A_PACKAGE)
    listed = BadRowsFile(tmp_path / "bad.jsonl")

    def reason(word: str, rows: list[dict[str, str]], **options: Any) -> list[str]:
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        with pytest.raises(DataError, match="cannot be used"):
            open_source(path, word, tokenizer, max_seq_len=96, cache_dir=tmp_path / "cache", bad_rows=listed, **options)
        told = [json.loads(line) for line in listed.path.read_text().splitlines()]
        assert {row["kind"] for row in told} == {"reader_failed"}
        assert all(row["reason"].startswith(f"{word} of pick-kit 1.0: it gave ") for row in told)
        return [row["reason"].partition(": it gave ")[2] for row in told]

    words = ("nothing", "single", "empty", "plain", "mixed", "undressed", "number", "human", "tool")
    more = ("bare tool", "keyed tool", "half a tool", "bare call", "call", "nan", "half", "half a thought", "unused")
    told = reason("pick", [{"give": word} for word in (*words, *more)])
    assert [line.removesuffix(": nan") for line in told] == [  # which Python's later versions add
        "None, not a list of Conversation",
        "a Conversation, not a list of Conversation",
        "an empty list; of a row that it cannot use it raises BadRow",
        "a list with a dict, not a list of Conversation",
        "a list with None, not a list of Conversation",
        "a Conversation with a dict in `messages`, not a ChatMessage",
        "a Conversation with a message whose `content` is an int, not text",
        "a Conversation with a message of role 'human'; roles are system, user, assistant, tool",
        "a Conversation with `tool_calls` that are not JSON: Object of type object is not JSON serializable",
        "a Conversation with an int in `tools`, not an object (a dict)",
        "a Conversation with `tools` that are not JSON: a key is an int, not text",
        f"a Conversation with `tools` with text that {HALF}",
        "a Conversation with an int in `tool_calls`, not an object (a dict)",
        "a Conversation with a message whose `tool_calls` is a dict, not a tuple",
        "a Conversation with `tool_calls` that are not JSON: Out of range float values are not JSON compliant",
        f"a Conversation with a message whose `content` {HALF}",
        f"a Conversation with a message whose `thought` {HALF}",
        "a Conversation with an int in `unused`, not text",
    ]
    assert reason("lazy", [{}]) == ["a generator, not a list of Conversation"]
    assert reason("pick", [{}], pairs=PairRules(64)) == ["a Conversation, not a Preference"]


def test_a_text_or_a_class_with_half_a_character_is_a_problem_of_the_row_in_its_readers_name(site: Path) -> None:
    install(site, "class-kit", {"class_formats": "classed = classes:classed"}, classes=ROWS_OF_A_PACKAGE)
    read = reader_of(CLASS_FORMATS, "classed", ClassRow)
    for field in ("text", "label"):
        with pytest.raises(
            BadRow, match=rf"^classed of class-kit 1\.0: it gave a ClassRow with `{field}` that {HALF}$"
        ):
            read({"of": {"text": "x", "label": "y", field: "\ud800"}})


def test_calls_and_tools_that_are_json_are_taken_from_a_packages_reader() -> None:
    call = {"name": "天气", "arguments": {"in": ("a", None), "at": [1.5, {"b": True}]}}
    said = (ChatMessage("user", "😀"), ChatMessage("assistant", "", tool_calls=(call,), thought="é"))
    assert unlike([Conversation(said, (call,), ("note",))], Conversation, several=True) == ""


@pytest.mark.parametrize("code", [0, 3, None])
def test_a_reader_that_ends_the_process_is_a_problem_of_the_row_and_the_command_goes_on(
    site: Path, base: Path, tmp_path: Path, code: int | None
) -> None:
    install(site, "leave-kit", {"formats": "leave = left:leave"}, left=ROWS_OF_A_PACKAGE)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"code": code}])
    with pytest.raises(DataError, match=rf"leave of leave-kit 1\.0: SystemExit: {code}"):
        open_source(path, "leave", load_tokenizer(base), max_seq_len=96, cache_dir=tmp_path / "cache")


def test_a_tracker_that_cannot_be_made_is_refused_and_one_without_a_name_has_its_word(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import erniekit

class Unmade(erniekit.Tracker):
    def __init__(self):
        raise RuntimeError("no server")

class Unnamed(erniekit.Tracker):
    def start(self, run):
        raise RuntimeError("no room")
"""
    install(site, "star-kit", {"trackers": "unmade = star:Unmade\nunnamed = star:Unnamed"}, star=text)
    with pytest.raises(ConfigError, match=r"unmade of the installed package star-kit 1\.0 .*no server") as caught:
        make_trackers(["unmade"], tmp_path)
    assert caught.value.where == f"report_to, {site / 'star.py'}:6"
    assert "leave unmade out of report_to" in caught.value.fix
    warned: list[str] = []
    monkeypatch.setattr("erniekit.track.base.warn", warned.append)
    with make_trackers(["unnamed"], tmp_path) as trackers:
        trackers.start(1)
    assert warned == ["unnamed tracker is off for the rest of this run: RuntimeError: no room"]
