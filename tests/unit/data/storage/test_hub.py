"""Datasets that the package `datasets` opens, streamed; and the refusal where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import stream_source
from erniekit.data.formats import detect, rows
from erniekit.data.storage import located
from erniekit.data.stream_source import StreamSource, file_versions, stream_fingerprint
from erniekit.data.stream_store import StreamStore
from erniekit.data.token_cache import cache_key
from erniekit.errors import DataError
from support.jsonl import write_jsonl
from support.sources import row_job

ROWS = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(50)]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="not a file or folder here") as refused:
        list(rows("owner/name"))
    assert "erniekit-torch[hub]" in refused.value.fix


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(DataError, match="'spilt' is not an option"):
        located("owner/name?spilt=test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("datasets", reason="an extra: pip install erniekit-torch[hub]")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "set" / "test.jsonl", ROWS[:5])
    return tmp_path / "set"


def test_rows_stream_in_the_order_of_the_dataset(folder: Path) -> None:
    assert list(rows(f"hf:{folder}")) == list(enumerate(ROWS, 1))
    assert [row for _, row in rows(f"hf:{folder}?split=test")] == ROWS[:5]
    assert detect(f"hf:{folder}").format == "prompt_completion"
    with pytest.raises(DataError, match="no split 'dev'") as refused:
        list(rows(f"hf:{folder}?split=dev"))
    assert "train, test" in refused.value.fix


def test_samples_equal_those_of_the_file_and_a_changed_file_is_another_dataset(folder: Path, opened) -> None:
    there, here = opened(f"hf:{folder}"), opened(folder / "train.jsonl")
    assert len(there) == len(here) == 50
    assert all(np.array_equal(there.sample(i).ids, here.sample(i).ids) for i in range(50))
    assert opened(f"hf:{folder}").fingerprint == there.fingerprint
    write_jsonl(folder / "train.jsonl", ROWS[:40])
    assert len(opened(f"hf:{folder}")) == 40


def test_streamed_samples_are_those_of_the_dataset_and_go_on_after_a_stop(
    folder: Path, opened, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_source, "CHUNK_ROWS", 8)
    word = f"hf:{folder}"

    def streamed() -> StreamSource:
        key = stream_fingerprint(versions := file_versions([word]), lambda content: cache_key(job(word), content))
        return StreamSource(word, [word], job, key, StreamStore(tmp_path / "streams" / key), 0.0, versions)

    def job(path: str):
        return row_job(path, None, tokenizer, max_seq_len=96)

    first = streamed()
    assert first.require(10)
    assert len(first) == 16
    first.close()
    second = streamed()
    assert not second.require(100)
    want = opened(folder / "train.jsonl")
    assert second.size == len(want) == 50
    assert all(np.array_equal(second.sample(i).ids, want.sample(i).ids) for i in range(50))
    write_jsonl(folder / "train.jsonl", ROWS[:40])
    assert streamed().fingerprint != second.fingerprint
