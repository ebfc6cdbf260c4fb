"""Text that is read while it is trained on: the rows of text that was indexed first, wherever a reader stopped."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import stream_source
from erniekit.data.pretrain import PretrainData, index_online
from erniekit.data.stream_source import file_versions, stream_fingerprint
from erniekit.data.stream_store import StreamStore
from erniekit.data.stream_text import StreamRows, StreamRowStream, StreamTextJob, TextStream
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Pack
from erniekit.errors import DataError
from support.jsonl import write_jsonl

LENGTH, PER_STEP, STEPS = 24, 4, 50


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_source, "CHUNK_ROWS", 3)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Documents of a word to several rows; one of several texts, one that is bad."""
    rows = [{"text": f"Document {n}. " + "The quiet river runs to the harbor. " * (n * n % 11)} for n in range(25)]
    first = write_jsonl(tmp_path / "a.jsonl", [*rows[:9], {"text": ["Two parts", "of one"]}, {"no": 1}, *rows[9:]])
    second = tmp_path / "b.txt"
    second.write_text("\n\n".join(f"Paragraph {n} of copper.\nIt has two lines." for n in range(14)))
    return [first, second]


class Streamed:
    """The rows of a run over streamed text."""

    def __init__(self, sources: list[TextStream], shares: list[Fraction], **options) -> None:
        self.sources = sources
        rows = [
            StreamRows(source, LENGTH, seed=7, number=number, vocab_size=None, **options)
            for number, source in enumerate(sources)
        ]
        self.stream = StreamRowStream(shares, rows, PER_STEP, STEPS)

    def pack(self, number: int) -> Pack:
        return Pack(tuple(self.sources[s].sample(i) for s, i in self.stream[number]), number)


@pytest.fixture
def streamed(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Streamed]:
    def call(*paths: Path, shares: tuple = (1,), bad: float = 0.1, **options) -> Streamed:
        def source(path: Path) -> TextStream:
            def job_of(path: str) -> StreamTextJob:
                return StreamTextJob.of(path, tokenizer, "text")

            key = stream_fingerprint(file_versions([str(path)]), job_of(str(path)).key)
            return TextStream(str(path), [str(path)], job_of, key, StreamStore(tmp_path / "streams" / key), bad)

        return Streamed([source(path) for path in paths], [Fraction(share) for share in shares], **options)

    return call


def told(made, numbers) -> list[list[tuple[list[int], list[int]]]]:
    return [[(s.ids.tolist(), s.labels.tolist()) for s in made.pack(number).samples] for number in numbers]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_are_those_of_text_that_was_indexed_first(
    masked: bool, count: int, files: list[Path], streamed: Callable, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpora, _ = index_online(files[:count], tokenizer, cache_dir=tmp_path / "c", num_proc=1, max_bad_fraction=0.1)
    weights = [0.7, 0.3][:count] if count > 1 else None
    whole = PretrainData(corpora, weights, max_seq_len=LENGTH, seed=7, shuffle=False, masked=masked)
    shares = (Fraction("0.7"), Fraction("0.3")) if count > 1 else (1,)
    made = streamed(*files[:count], shares=shares, shuffle=False, masked=masked, block=5)
    assert len(whole) < PER_STEP * STEPS, "passes begin again"
    assert told(made, range(PER_STEP * STEPS)) == told(whole, range(PER_STEP * STEPS))


def test_no_more_is_read_than_a_step_takes_and_another_reader_goes_on_from_there(
    files: list[Path], streamed: Callable
) -> None:
    options = dict(shuffle=True, masked=True, block=6)
    first = streamed(files[0], **options)
    head = told(first, range(PER_STEP))
    assert first.sources[0].size is None
    read = len(first.sources[0])
    first.sources[0].close()
    again = streamed(files[0], **options)
    rest = told(again, range(PER_STEP, 8 * PER_STEP))
    assert len(again.sources[0]) > read
    again.sources[0].close()
    whole = streamed(files[0], **options)
    assert told(whole, reversed(range(8 * PER_STEP)))[::-1] == head + rest, "whatever is asked for first"


def test_shuffled_documents_are_all_read_once_in_each_pass_in_another_order(
    files: list[Path], streamed: Callable
) -> None:
    made, plain = (streamed(files[0], shuffle=shuffle, masked=True, block=6) for shuffle in (True, False))
    rows = made.stream.sources[0]
    told(made, [PER_STEP * STEPS - 1])
    tokens = made.sources[0].read_tokens
    per_pass = -(-(tokens - 1) // LENGTH)

    def read(made: Streamed, number: int) -> list[int]:
        packs = [made.pack(number * per_pass + k) for k in range(per_pass)]
        return np.concatenate([s.ids for pack in packs for s in pack.samples]).tolist()

    first, second, straight = read(made, 0), read(made, 1), read(plain, 0)
    assert first != second
    assert first != straight
    assert len(first) == len(second) == len(straight) == tokens - 1
    assert rows.max_seq_len == LENGTH


def test_bad_rows_stop_it_and_text_without_a_row_is_named(
    files: list[Path], streamed: Callable, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="cannot be used"):
        told(streamed(files[0], bad=0.0, shuffle=False, masked=True, block=5), range(PER_STEP * STEPS))
    empty = write_jsonl(tmp_path / "short.jsonl", [{"no": 1}])
    with pytest.raises(DataError):
        told(streamed(empty, bad=1.0, shuffle=False, masked=True, block=5), [0])
