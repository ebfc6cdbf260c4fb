"""Columns that are called otherwise: renamed by the recipe, and mistakes answered with the names that are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.config import load
from erniekit.data.formats import check_columns, detect, parse, rows
from erniekit.data.formats.columns import as_columns
from erniekit.errors import ConfigError, DataError
from support.jsonl import write_jsonl

ROWS = [{"q": "one", "a": " two", "prompt": "not this", "id": 3}]
COLUMNS = as_columns({"prompt": "q", "response": "a"})


def test_renamed_columns_decide_the_format_and_what_they_cover_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert detect(path, columns=COLUMNS).format == "prompt_completion"
    ((line, raw),) = rows(path)
    (found,) = parse(raw, line, path, "prompt_completion", columns=COLUMNS)
    assert [m.content for m in found.messages] == ["one", " two"]
    assert set(found.unused) == {"prompt (of the file)", "id"}


def test_a_table_with_names_of_its_own_trains_like_one_with_ours(tmp_path: Path, opened) -> None:
    theirs, ours = tmp_path / "a.csv", tmp_path / "b.csv"
    theirs.write_text("frage,antwort\nEins?,Zwei.\n", encoding="utf-8")
    ours.write_text("prompt,response\nEins?,Zwei.\n", encoding="utf-8")
    one = opened(theirs, columns=as_columns({"prompt": "frage", "response": "antwort"}))
    two = opened(ours)
    assert np.array_equal(one.sample(0).ids, two.sample(0).ids)
    assert np.array_equal(one.sample(0).labels, two.sample(0).labels)


def test_messages_and_preferences_are_renamed_too(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"dialog": said}])
    assert detect(path, columns=as_columns({"messages": "dialog"})).format == "messages"
    path = write_jsonl(tmp_path / "b.jsonl", [{"q": "q", "good": "a", "bad": "b"}])
    found = detect(path, columns=as_columns({"prompt": "q", "chosen": "good", "rejected": "bad"}))
    assert found.preference


def test_an_unknown_column_is_answered_with_those_seen_and_the_nearest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question_text": "q", "answer_text": "a"}])
    with pytest.raises(DataError, match="question_text, answer_text") as refused:
        check_columns(path, as_columns({"prompt": "question_txt"}))
    assert "did you mean question_text?" in refused.value.fix


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no field 'promptt'") as refused:
        as_columns({"promptt": "q"})
    assert "prompt" in refused.value.fix
    with pytest.raises(ConfigError, match="no name of a column"):
        as_columns({"prompt": 3})
    with pytest.raises(ConfigError) as glued:  # {prompt:q} of a shell
        as_columns({"prompt:q": None})
    assert "columns.prompt=q" in glued.value.fix


def test_a_recipe_gives_them_as_a_mapping_and_words_change_one(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("columns: {prompt: q, response: a}\ntrain_dataset_path: a.jsonl\n")
    assert dict(load([str(recipe)], "data").data.columns) == {"prompt": "q", "response": "a"}
    assert dict(load([str(recipe), "columns.response=b"], "data").data.columns) == {"prompt": "q", "response": "b"}
