"""Documents as rows: every token once, row j without those before it, and attention that stops where it should."""

from __future__ import annotations

import time

import numpy as np
import pytest

from erniekit.data import documents
from erniekit.data.documents import DocumentPiece, DocumentRows, part_of, scatter
from erniekit.data.mmap_files import open_files, write_idx
from erniekit.data.types import IGNORE
from erniekit.errors import ConfigError, DataError


def corpus(folder, lengths, name="a", tokens=None):
    """Token t of the file is t itself: a row shows where it comes from."""
    prefix, total = str(folder / name), int(np.sum(lengths, dtype=np.int64))
    (np.arange(total, dtype="<i4") if tokens is None else np.array(tokens, "<i4")).tofile(prefix + ".bin")
    with open(prefix + ".idx", "wb") as out:
        write_idx(out, np.dtype("<i4"), np.asarray(lengths), np.arange(len(lengths) + 1))
    return open_files(prefix)


LENGTHS = [5, 0, 17, 1, 8, 3, 30, 2, 1, 9]
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])


@pytest.fixture
def files(tmp_path):
    return corpus(tmp_path, LENGTHS)


def rows_of(source, epoch=0):
    return [
        [source.sample(i) for i in source.members(j)] for j in range(epoch * source.rows, (epoch + 1) * source.rows)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [1, 4, 7, 75, 76, 500])
def test_every_token_but_the_first_is_predicted_once_an_epoch(files, length, shuffle):
    source = DocumentRows(files, range(10), length, shuffle=shuffle, seed=3)
    assert source.rows == -(-75 // length)
    for epoch in (0, 1):
        rows = rows_of(source, epoch)
        assert sum(len(row[0].ids) < length for row in rows) <= 1
        inputs, labels = (np.concatenate([getattr(row[0], k) for row in rows]) for k in ("ids", "labels"))
        assert len(inputs) == 75
        assert len(set(inputs.tolist())) == len(set(labels.tolist())) == 75
        (first,), (last,) = set(range(76)) - set(labels.tolist()), set(range(76)) - set(inputs.tolist())
        assert first in STARTS
        assert last + 1 in STARTS


def test_without_shuffling_rows_are_the_file_cut_evenly(files):
    source = DocumentRows(files, range(10), 10, shuffle=False)
    for j in range(16):
        (sample,) = [source.sample(i) for i in source.members(j)]
        begin = j % 8 * 10
        assert sample.ids.tolist() == list(range(begin, min(begin + 10, 75)))
        assert sample.labels.tolist() == [t + 1 for t in sample.ids.tolist()]
        assert sample.ids.dtype == sample.labels.dtype == np.int32


def test_masked_rows_hold_the_same_tokens_cut_where_documents_end(files):
    for shuffle in (False, True):
        plain, masked = (DocumentRows(files, range(10), 10, shuffle=shuffle, seed=5, masked=m) for m in (False, True))
        for row, (whole,) in zip(rows_of(masked), rows_of(plain)):
            np.testing.assert_array_equal(np.concatenate([s.ids for s in row]), whole.ids)
            for sample in row:
                document = np.searchsorted(STARTS, sample.ids[0], "right")
                assert (np.searchsorted(STARTS, sample.ids, "right") == document).all()
                assert (np.diff(sample.ids) == 1).all()
                ends = sample.ids[-1] + 1 in STARTS
                expected = sample.ids + 1
                if ends:
                    expected[-1] = IGNORE
                assert sample.labels.tolist() == expected.tolist()


def test_a_row_is_the_same_whatever_was_read_before_and_whoever_reads_it(files):
    first = DocumentRows(files, range(10), 6, seed=9)
    every = [rows_of(first, epoch) for epoch in range(4)]
    for epoch, number in ((3, 2), (0, 11), (2, 0), (3, 12), (1, 5)):
        fresh = DocumentRows(files, range(10), 6, seed=9)
        (sample,) = [fresh.sample(i) for i in fresh.members(epoch * first.rows + number)]
        np.testing.assert_array_equal(sample.ids, every[epoch][number][0].ids)


def test_epochs_seeds_and_neighbours_differ_in_order(files):
    def order(**options):
        source = DocumentRows(files, range(10), 4, **options)
        return [[row[0].ids.tolist() for row in rows_of(source, epoch)] for epoch in (0, 1)]

    a, b = order(seed=1)
    assert a != b
    assert order(seed=1) == [a, b]
    assert order(seed=2)[0] != a
    assert order(seed=1, number=1)[0] != a
    assert order(seed=2**40 + 1)[0] != a


def test_the_rows_of_one_long_document_do_not_follow_each_other(tmp_path):
    source = DocumentRows(corpus(tmp_path, [4000]), range(1), 4, seed=0)
    firsts = [source.sample(j).ids[0] // 4 for j in range(source.rows)]
    assert sorted(firsts) == list(range(1000))
    steps = np.abs(np.diff(firsts))
    assert (steps == 1).mean() < 0.01
    assert 250 < steps.mean() < 420  # a third of the rows, when any may come after any


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_scatter_is_one_to_one(size):
    for key in (0, 1, 2**63):
        assert sorted(scatter(place, size, key) for place in range(size)) == list(range(size))
    assert size < 5 or len({tuple(scatter(p, size, key) for p in range(size)) for key in range(20)}) > 15


def test_the_parts_are_neighbours_that_share_no_document():
    assert [part_of("998,1,1", 5000, part) for part in documents.PARTS] == [
        range(4990),
        range(4990, 4995),
        range(4995, 5000),
    ]
    assert [part_of("950,50", 100, part) for part in documents.PARTS] == [range(95), range(95, 100), range(100, 100)]
    assert part_of("1", 7, "train") == range(7)
    assert part_of("969/30/1", 1000, "eval") == range(969, 999)
    for count in range(30):
        parts = [part_of("0.7,0.2,0.1", count, part) for part in documents.PARTS]
        assert [n for part in parts for n in part] == list(range(count))
    for wrong in ("", "a,b", "-1,2", "0,0,0", "1,1,1,1", "inf,1", "nan"):
        with pytest.raises(ConfigError, match="split"):
            part_of(wrong, 10, "train")


def test_only_the_documents_of_the_part_are_read(files):
    source = DocumentRows(files, range(4, 7), 5, seed=1)
    seen = {t for row in rows_of(source) for t in row[0].ids.tolist() + row[0].labels.tolist()}
    assert seen == set(range(STARTS[4], STARTS[7]))
    assert DocumentRows(files, range(0), 5).rows == 0
    assert DocumentRows(files, range(3, 4), 5).rows == 0  # one token predicts nothing


def test_a_piece_of_any_place_survives_being_one_integer():
    for piece in (DocumentPiece(0, 1, False), DocumentPiece(2**45, 131072, True), DocumentPiece(3, 2**31, False)):
        assert DocumentPiece.of(piece.code()) == piece


@pytest.mark.parametrize("masked", [False, True])
def test_a_token_that_the_model_does_not_know_is_named_with_its_place(files, masked):
    source = DocumentRows(files, range(10), 10, shuffle=False, masked=masked, vocab_size=60)
    source.sample(source.members(0)[0])
    with pytest.raises(DataError, match=r"token 6\d is not in the model's vocabulary of 60") as caught:
        [source.sample(i) for i in source.members(6)]
    assert "a.bin" in caught.value.where


def test_a_large_order_is_kept_on_disk_once_and_gives_the_same_rows(tmp_path, files, monkeypatch):
    options = {"seed": 4, "cache_dir": tmp_path / "cache"}
    small = [rows_of(DocumentRows(files, range(10), 6, **options), epoch) for epoch in (0, 1)]
    monkeypatch.setattr(documents, "IN_MEMORY", 3)
    for attempt in range(2):
        if attempt:
            monkeypatch.setattr(DocumentRows, "_make_epoch", None)  # the second only looks up
        large = DocumentRows(files, range(10), 6, **options)
        for epoch in (0, 1):
            for kept, made in zip(rows_of(large, epoch), small[epoch]):
                np.testing.assert_array_equal(kept[0].ids, made[0].ids)
    folders = [p for p in (tmp_path / "cache" / "orders").iterdir() if p.is_dir()]
    assert len(folders) == 2


def test_a_kept_order_that_a_power_cut_zeroed_is_made_again(tmp_path, files, monkeypatch):
    options = {"seed": 4, "cache_dir": tmp_path / "cache"}
    want = [row[0].ids.tolist() for row in rows_of(DocumentRows(files, range(10), 6, **options))]
    monkeypatch.setattr(documents, "IN_MEMORY", 3)
    DocumentRows(files, range(10), 6, **options).sample(0)
    for name in ("order.npy", "bounds.npy", "order.npy"):
        (kept,) = (tmp_path / "cache" / "orders").glob(f"*/{name}")
        raw = kept.read_bytes()
        kept.write_bytes(raw[:128] + bytes(len(raw) - 128))  # the header came to disk, what it describes did not
        again = DocumentRows(files, range(10), 6, **options)
        assert [row[0].ids.tolist() for row in rows_of(again)] == want
        assert kept.read_bytes() == raw


@pytest.mark.full
def test_a_hundred_million_documents_are_ordered_in_minutes_and_a_row_is_found_in_milliseconds(tmp_path):
    """The index alone, and a token file that is a hole: what is measured is finding a row."""
    count = 10**8
    lengths = np.random.RandomState(0).randint(1, 1000, count).astype(np.int32)
    prefix = str(tmp_path / "a")
    with open(prefix + ".idx", "wb") as out:
        write_idx(out, np.dtype("<u2"), lengths, np.arange(count + 1))
    with open(prefix + ".bin", "wb") as out:
        out.truncate(2 * int(lengths.sum(dtype=np.int64)))
    began = time.monotonic()
    files = open_files(prefix)
    opened = time.monotonic()
    source = DocumentRows(files, range(count), 4096, seed=1, masked=True, cache_dir=tmp_path / "cache")
    source.members(0)
    ordered = time.monotonic()
    for j in range(2000):
        for i in source.members(j * 1000):
            source.sample(i)
    read = (time.monotonic() - ordered) / 2000
    print(f"10^8 documents: opened {opened - began:.1f} s, ordered {ordered - opened:.1f} s, {read * 1e3:.2f} ms a row")
    assert ordered - began < 300
    assert read < 0.1
