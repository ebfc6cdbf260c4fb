"""`compat: erniekit` is a set of named behaviours: none by default, all under the key, each told to users."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import erniekit
from erniekit.config import load
from erniekit.config.compat import COMPAT, ERNIEKIT, PLAIN, Compat
from erniekit.config.flat import KEYS

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(erniekit.__file__).parent


def table() -> list[str]:
    """First column of the table in docs/compat.md."""
    text = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
    rows = text.partition("| | default | `compat: erniekit` |\n|---|---|---|\n")[2].partition("\n\n")[0]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows.splitlines()]


def test_the_default_repeats_nothing_and_erniekit_everything():
    assert not any(getattr(PLAIN, f.name) for f in fields(Compat))
    assert all(getattr(ERNIEKIT, f.name) for f in fields(Compat))
    assert tuple(COMPAT) == KEYS["compat"].choices


def test_a_run_asks_its_config():
    assert load([], "train").compat is PLAIN
    assert load(["compat=erniekit"], "train").compat is ERNIEKIT
    with pytest.raises(FrozenInstanceError):
        PLAIN.erniekit_rows = True  # type: ignore[misc]


def test_every_behaviour_has_a_reason_of_one_line_and_a_row_in_the_documentation():
    rows = table()
    assert len(rows) == len(set(rows)) > 10
    for f in fields(Compat):
        assert f.metadata["reason"].endswith((".", ")."))
        assert "\n" not in f.metadata["reason"]
        assert f.metadata["rows"], f.name
    assert {row for f in fields(Compat) for row in f.metadata["rows"]} == set(rows)


def test_every_behaviour_is_asked_for_by_name_and_nothing_compares_the_key():
    text = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name != "compat.py" or "config" not in str(p))
    assert {f.name for f in fields(Compat)} - set(re.findall(r"compat\.(\w+)", text)) == set()
    assert not re.findall(r"compat\"?\]? *[!=]= *[\"']", text)
