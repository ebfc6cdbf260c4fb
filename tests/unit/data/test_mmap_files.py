"""Token files: the published bytes in both directions, both layouts, and an error that names what is wrong."""

from __future__ import annotations

import io
import os
import re
import struct

import numpy as np
import pytest

from erniekit.data import mmap_files
from erniekit.data.mmap_files import find, narrowest, npy_head, open_files, write_idx, write_npz
from erniekit.errors import DataError

SIZES, DOCS = [3, 1, 4, 2], [0, 2, 2, 3, 4]  # the second document is empty
TOKENS = [7, 300, 5, 9, 1, 2, 3, 4, 65000, 6]


def idx_bytes(code, width, sizes=SIZES, docs=DOCS, version=1, magic=b"MMIDIDX\x00\x00"):
    """The format as it is described: everything little-endian, one thing behind the other."""
    pointers = [width * sum(sizes[:i]) for i in range(len(sizes))]
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<QQ", len(sizes), len(docs))
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + struct.pack(f"<{len(sizes)}q", *pointers)
        + struct.pack(f"<{len(docs)}q", *docs)
    )


def put(folder, code=8, letter="H", tokens=TOKENS, idx=None, name="a"):
    (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    (folder / f"{name}.idx").write_bytes(idx_bytes(code, struct.calcsize(letter)) if idx is None else idx)
    return str(folder / name)


@pytest.mark.parametrize(
    ("code", "letter", "dtype"),
    [(1, "B", "u1"), (2, "b", "i1"), (3, "h", "i2"), (4, "i", "i4"), (5, "q", "i8"), (8, "H", "u2")],
)
def test_files_of_every_integer_type_are_read_by_the_published_format(tmp_path, code, letter, dtype):
    tokens = [t % 100 for t in TOKENS] if code < 4 else TOKENS
    files = open_files(put(tmp_path, code, letter, tokens))
    assert files.dtype == np.dtype(dtype)
    assert (files.num_documents, files.num_tokens) == (4, 10)
    assert files.lengths(0, 4).tolist() == [4, 0, 4, 2]
    assert files.lengths(2, 4).tolist() == [4, 2]
    assert files.starts(np.array([3, 0, 4, 1])).tolist() == [8, 0, 10, 4]
    assert files.tokens(0, 10).tolist() == tokens
    assert files.tokens(8, 2).tolist() == tokens[8:]
    assert files.tokens(0, 10).dtype == np.int32


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (1, "|u1")])
def test_the_index_that_is_written_is_the_published_format_byte_for_byte(code, dtype):
    out = io.BytesIO()
    write_idx(out, np.dtype(dtype), np.array(SIZES), np.array(DOCS))
    assert out.getvalue() == idx_bytes(code, np.dtype(dtype).itemsize)


def test_the_modes_that_megatron_appends_are_no_damage(tmp_path):
    prefix = put(tmp_path, idx=idx_bytes(8, 2) + bytes(len(SIZES)))
    assert open_files(prefix).num_documents == 4


def test_one_sequence_a_document_needs_no_sums(tmp_path):
    prefix = put(tmp_path, idx=idx_bytes(8, 2, docs=[0, 1, 2, 3, 4]))
    assert open_files(prefix).lengths(1, 4).tolist() == SIZES[1:]


def put_npy(folder, lens=SIZES, docs=DOCS, tokens=TOKENS, name="a"):
    np.save(folder / f"{name}_ids.npy", np.array(tokens, np.uint16))
    arrays = {"lens": np.array(lens, np.int32)} | ({} if docs is None else {"docs": np.array(docs, np.int64)})
    np.savez(folder / f"{name}_idx.npz", **arrays)
    return str(folder / name)


def test_the_older_numpy_pair_is_read_the_same(tmp_path):
    files = open_files(put_npy(tmp_path))
    assert files.lengths(0, 4).tolist() == [4, 0, 4, 2]
    assert files.tokens(3, 4).tolist() == TOKENS[3:7]
    assert open_files(put_npy(tmp_path, docs=None, name="b")).lengths(0, 4).tolist() == SIZES


def test_what_we_write_for_numpy_is_what_numpy_writes_and_reads(tmp_path):
    for count in (0, 10, 10**13):
        head = npy_head(np.dtype("<u2"), count)
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, {"descr": "<u2", "fortran_order": False, "shape": (count,)})
        assert len(head) == len(out.getvalue()) == 128
        assert head.split() == out.getvalue().split()
    tokens = np.array(TOKENS, "<u2")
    (tmp_path / "a_ids.npy").write_bytes(npy_head(tokens.dtype, len(tokens)) + tokens.tobytes())
    with open(tmp_path / "a_idx.npz", "wb") as file:
        write_npz(file, np.array(SIZES), np.array(DOCS))
    np.testing.assert_array_equal(np.load(tmp_path / "a_ids.npy"), tokens)
    with np.load(tmp_path / "a_idx.npz") as stored:
        assert stored["lens"].tolist() == SIZES
        assert stored["docs"].tolist() == DOCS
    assert open_files(str(tmp_path / "a")).tokens(0, 10).tolist() == TOKENS


def test_a_prefix_a_file_and_a_folder_name_the_same_data_set(tmp_path):
    prefix = put(tmp_path)
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", tmp_path):
        assert find(name) == [prefix]
    older = put_npy(tmp_path, name="b")
    assert find(f"{older}_ids.npy") == find(f"{older}_idx.npz") == [older]
    assert find(tmp_path) == [prefix, older]


def test_a_name_without_files_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match=r"none\.bin and .*none\.idx"):
        find(tmp_path / "none")
    with pytest.raises(DataError, match=r"holds no \.idx"):
        find(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.bin has no a\.idx"):
        find(tmp_path / "a")
    (tmp_path / "a.bin").rename(tmp_path / "a.idx")
    with pytest.raises(DataError, match=r"a\.idx has no a\.bin"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("idx", "told"),
    [
        (b"PK\x03\x04" + bytes(60), "begins with b'PK"),
        (idx_bytes(8, 2)[:20], "ends in its header: 20 bytes, 34 at least"),
        (idx_bytes(8, 2)[:-5], "4 sequences and 5 document bounds need 122 bytes, the file has 117"),
        (idx_bytes(8, 2) + b"x", "need 122 bytes, the file has 123"),
        (idx_bytes(8, 2, version=2), "version 2; version 1 is known"),
        (idx_bytes(7, 2), "numbers with a fraction"),
        (idx_bytes(9, 2), "dtype code 9 is unknown"),
        (idx_bytes(8, 4), "sequence 1 of 1 tokens is declared to begin at byte 12"),
        (idx_bytes(8, 2, sizes=[3, 1, 4, 3]), "describes 22 bytes of uint16 tokens, the file holds 20"),
        (idx_bytes(8, 2, sizes=[3, 1, 4]), "describes 16 bytes of uint16 tokens, the file holds 20"),
        (idx_bytes(8, 2, sizes=[3, 1, -4, 2]), "sequence 2 of -4 tokens"),
        (idx_bytes(8, 2, docs=[0, 2, 3]), "rise from 0 to 4 sequences; they say from 0 to 3"),
        (idx_bytes(8, 2, docs=[0, 3, 2, 4]), "rise from 0 to 4"),
        (idx_bytes(8, 2, docs=[]), "they say nothing"),
        (b"", "begins with b''"),
    ],
)
def test_a_damaged_index_is_refused_with_what_was_expected(tmp_path, idx, told):
    prefix = put(tmp_path, idx=idx)
    with pytest.raises(DataError, match=re.escape(told)) as caught:
        open_files(prefix)
    assert str(tmp_path / "a.") in caught.value.where


def test_a_damaged_numpy_pair_is_refused_with_what_was_expected(tmp_path):
    prefix = put_npy(tmp_path, tokens=TOKENS[:-1])
    with pytest.raises(DataError, match="describes 10 tokens, the file holds 9"):
        open_files(prefix)
    whole = put_npy(tmp_path)
    path = tmp_path / "a_ids.npy"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="describes 20 bytes of uint16 tokens, the file holds 18"):
        open_files(whole)
    path.write_bytes(b"text")
    with pytest.raises(DataError, match=r"not a \.npy file"):
        open_files(whole)
    np.save(path, np.zeros(10, np.float32))
    with pytest.raises(DataError, match="float32 values are not tokens"):
        open_files(whole)
    put_npy(tmp_path)
    np.savez(tmp_path / "a_idx.npz", sizes=np.array(SIZES))
    with pytest.raises(DataError, match="it has sizes; `lens` is expected"):
        open_files(whole)
    (tmp_path / "a_idx.npz").write_bytes(b"PK\x03\x04cut")
    with pytest.raises(DataError, match=r"not a readable \.npz"):
        open_files(whole)


def test_a_file_that_shrinks_while_it_is_read_is_said_so(tmp_path):
    files = open_files(put(tmp_path))
    (tmp_path / "a.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="changed while in use"):
        files.tokens(0, 5)


def test_the_fingerprint_follows_the_content_not_the_name(tmp_path):
    first = open_files(put(tmp_path)).fingerprint()
    assert open_files(put(tmp_path, name="b")).fingerprint() == first
    assert open_files(put(tmp_path, name="c", tokens=[8, *TOKENS[1:]])).fingerprint() != first
    assert open_files(put(tmp_path, name="d", idx=idx_bytes(8, 2, docs=[0, 4]))).fingerprint() != first


def test_any_token_of_a_file_that_is_read_whole_is_in_its_fingerprint(tmp_path):
    """4 MiB of tokens, changed in their very middle."""
    tokens = np.arange(1 << 20, dtype="<i4")
    with open(tmp_path / "a.idx", "wb") as out:
        write_idx(out, tokens.dtype, np.array([len(tokens)]), np.array([0, 1]))
    tokens.tofile(tmp_path / "a.bin")
    first = open_files(str(tmp_path / "a"))
    told = first.fingerprint()
    assert not first.sampled
    tokens[len(tokens) // 2] += 1
    tokens.tofile(tmp_path / "a.bin")
    assert open_files(str(tmp_path / "a")).fingerprint() != told


def test_a_file_too_large_to_be_read_whole_is_sampled_all_over_and_has_its_date(tmp_path, monkeypatch):
    monkeypatch.setattr(mmap_files, "WHOLE", 1 << 20)
    monkeypatch.setattr(mmap_files.sealed, "SAMPLES", 9)
    tokens = np.zeros(1 << 20, dtype="<i4")
    with open(tmp_path / "a.idx", "wb") as out:
        write_idx(out, tokens.dtype, np.array([len(tokens)]), np.array([0, 1]))

    def opened():
        tokens.tofile(tmp_path / "a.bin")
        return open_files(str(tmp_path / "a"))

    first = opened()
    told = first.fingerprint()
    assert first.sampled
    os.utime(tmp_path / "a.bin", ns=(1, 10**18))
    assert first.written == 10**18
    tokens[len(tokens) * 5 // 8 : len(tokens) * 6 // 8] = 7  # another eighth of it
    assert opened().fingerprint() != told


def test_two_bytes_a_token_are_taken_where_they_are_enough():
    assert narrowest(32000) == "uint16"
    assert narrowest(103424) == "int32"
