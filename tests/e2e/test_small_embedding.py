"""A tokenizer with more ids than the embedding has rows: told in three lines by every command, never an IndexError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import erniekit
from erniekit.cli.main import main
from erniekit.data.tokenizer import load_tokenizer
from erniekit.demo import tiny
from erniekit.errors import CheckpointError

ROWS = 1000  # of the tokenizer's 1,280


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.SHAPE, "vocab_size", ROWS)
        return tiny.make_tiny_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def beyond(small: Path) -> str:
    """A text of one token that has no row."""
    tokenizer = load_tokenizer(small)
    return next(
        text
        for id in range(ROWS, tokenizer.vocab_size)
        if max(tokenizer.encode_text(text := tokenizer.decode([id]))) >= ROWS
    )


@pytest.fixture
def words(small: Path, tmp_path: Path) -> list[str]:
    keys = dict(
        model_name_or_path=small, output_dir=tmp_path / "out", cache_dir=tmp_path / "cache", max_seq_len=64,
        max_steps=1, device="cpu", report_to="none", dataset_num_proc=1,
    )  # fmt: skip
    return [f"{key}={value}" for key, value in keys.items()]


def rows(path: Path, answer: str) -> Path:
    path.write_text("".join(json.dumps({"src": [f"{k} + 1?"], "tgt": [answer]}) + "\n" for k in range(8)))
    return path


def refused(args: list[str], capsys: pytest.CaptureFixture) -> str:
    code = main(args)
    said = "".join(capsys.readouterr())
    assert code == 2, said
    assert "Traceback" not in said
    assert "fault of erniekit" not in said
    return said


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_it_is_refused_before_data_is_read(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    unread = tmp_path / "no.jsonl"
    unread.write_text("whoever reads this finds no JSON")
    said = refused([command, *words, f"train_dataset_path={unread}"], capsys)
    assert "1,280 token ids do not fit the 1,000-row embedding" in said
    assert "check tokenizer_name" in said


def test_without_the_doctor_a_token_that_occurs_is_named(
    words: list[str], beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = rows(tmp_path / "rows.jsonl", beyond)
    said = refused(["train", *words, f"train_dataset_path={data}", "doctor=off"], capsys)
    assert "the model's embedding 1,000 rows" in said


def test_without_the_doctor_data_that_uses_none_of_those_ids_trains(words: list[str], tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", "2")
    assert main(["train", *words, f"train_dataset_path={data}", "doctor=off"]) == 0


def test_tokens_kept_for_a_larger_model_are_not_taken_for_this_one(
    words: list[str], beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = rows(tmp_path / "rows.jsonl", beyond)
    large = tiny.make_tiny_model(tmp_path / "large")
    args = ["train", *words, f"train_dataset_path={data}", "doctor=off"]
    assert main([*args, f"model_name_or_path={large}", f"output_dir={tmp_path / 'first'}"]) == 0
    assert "the model's embedding 1,000 rows" in refused(args, capsys)


def test_an_evaluation_names_the_token(
    words: list[str], beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = rows(tmp_path / "rows.jsonl", beyond)
    assert "the model's embedding 1,000 rows" in refused(["eval", *words, f"eval_dataset_path={data}"], capsys)


def test_a_loaded_model_s_tokenizer_gives_no_id_without_a_row(small: Path, beyond: str) -> None:
    _, tokenizer = erniekit.load(small)
    assert max(tokenizer.encode_text("1 + 1")) < ROWS
    with pytest.raises(CheckpointError, match="1,000 rows"):
        tokenizer.encode_text(beyond)
    with pytest.raises(CheckpointError, match="1,000 rows"):
        tokenizer.encode_rendered([(f"User: {beyond}", True)])


def test_an_end_token_without_a_row_is_refused_when_the_tokenizer_is_loaded(small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has id \d, the model's embedding 2 rows"):
        load_tokenizer(small, 2)


def test_indexed_text_with_tokens_beyond_the_embedding_is_refused(
    words: list[str], small: Path, beyond: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{beyond} {k} " * 20}) + "\n" for k in range(20)))
    index = ["data", "index", str(text), "--model_name_or_path", str(small), "--output", str(tmp_path / "corpus")]
    assert main([*index, "--num_proc", "1"]) == 0
    said = refused(["train", *words, "stage=PT", f"input_dir={tmp_path / 'corpus'}", "doctor=off"], capsys)
    assert "is not in the model's vocabulary of 1,000" in said
