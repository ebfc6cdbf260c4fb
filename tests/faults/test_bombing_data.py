"""Data files that are deep, that unpack to far more than they weigh, or whose counts lie: row P3.

Each reader ends in bounded time and memory, with the file and the line; what can be read before the damage is read.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from erniekit.cli.main import main
from erniekit.data import mmap_files
from erniekit.data.formats import files
from erniekit.data.formats.files import decode, rows
from erniekit.data.text_rows import Place as Position
from erniekit.data.text_rows import documents
from erniekit.data.types import RowProblem
from erniekit.errors import DataError, ErnieKitError
from faults.results import fault
from support.clock import within

SECONDS, MIB = 20.0, 1 << 20  # of processor time for one file; two bombs of 256 MiB are unpacked
MEMORY = 600 << 10  # KiB beyond what the process had: a row of 64 MiB, as bytes, as text and as values


def bomb(path: Path, block: bytes, times: int, head: bytes = b"") -> Path:
    """A .gz of `times` blocks, packed once and written again and again."""
    with path.open("wb") as out:
        packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        out.write(packer.compress(head))
        for _ in range(times):
            out.write(packer.compress(block))
        out.write(packer.flush())
    return path


def read_all(path: Path) -> list[RowProblem]:
    """The problems of a file, every row decoded."""
    found = []
    for number, raw in rows(path):
        if isinstance(raw, RowProblem):
            found.append(raw)
            continue
        try:
            decode(raw)
        except (ValueError, RecursionError) as error:
            found.append(RowProblem(str(path), number, "bad_json", str(error)[:80]))
    return found


def bounded(read: Callable[[], list[RowProblem]]) -> list[RowProblem]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = read()
    assert within(time.process_time() - began, SECONDS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
    return found


def deep(folder: Path, scale: int) -> Path:
    return bomb(folder / "deep.json.gz", b"[" * MIB, 4 * scale)


def deep_objects(folder: Path, scale: int) -> Path:
    return bomb(folder / "objects.json.gz", b'{"a":' * (MIB // 5), 4 * scale, b"[")


def flat(folder: Path, scale: int) -> Path:
    return bomb(folder / "flat.json.gz", b"[]," * (MIB // 3), 4 * scale, b"[[[\x00")


def blank_lines(folder: Path, scale: int) -> Path:
    return bomb(folder / "blank.jsonl.gz", b"\n" * MIB, scale)


def one_line(folder: Path, scale: int) -> Path:
    return bomb(folder / "line.jsonl.gz", b"x" * MIB, 66 * scale)


def deep_line(folder: Path, scale: int) -> Path:
    path = folder / "deep.jsonl"
    path.write_bytes(b'{"src": "a", "tgt": "b"}\n' + b"[" * (scale * MIB) + b"\n" + b'{"src": "a", "tgt": "b"}\n')
    return path


def digits(folder: Path, scale: int) -> Path:
    path = folder / "digits.json"
    path.write_bytes(b"[" + b"9" * (scale * MIB) + b"]")
    return path


CASES = (deep, deep_objects, flat, blank_lines, one_line, deep_line, digits)


@pytest.mark.parametrize("scale", [1, pytest.param(25, marks=pytest.mark.full)])
def test_deep_and_bombing_files_end_in_bounded_time_with_file_and_line(tmp_path, scale):
    with fault("P3", "deep rows and archives that unpack a thousandfold") as row:
        longest = 0.0
        for case in CASES:
            row.count += 1
            path = case(tmp_path, scale)
            began = time.process_time()
            found = bounded(lambda path=path: read_all(path))
            longest = max(longest, time.process_time() - began)
            assert found, case.__name__
            assert found[0].file == str(path)
            assert found[0].line >= 1
            row.hits += 1
        row.note = f"each named with its line within {longest:.1f} s of processor time"


def test_an_archive_that_unpacks_too_far_is_refused_and_what_came_before_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "EXPANDS_FROM", MIB)
    line = json.dumps({"src": "a" * 900, "tgt": "b"}).encode() + b"\n"
    path = bomb(tmp_path / "rows.jsonl.gz", line * 1000, 60)
    found = list(rows(path))
    assert isinstance(found[-1][1], RowProblem)
    assert "unpacks to more than 200 times its size" in found[-1][1].reason
    assert len(found) > 1000


def test_text_for_indexing_has_the_same_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "EXPANDS_FROM", MIB)
    path = bomb(tmp_path / "rows.txt.gz", b"word " * 1000 + b"\n\n", 4000)
    found = list(documents(path, Position()))
    assert isinstance(found[-1].raw, RowProblem)
    assert "200 times" in found[-1].raw.reason
    monkeypatch.setattr(files, "MAX_SKIPPED_BYTES", 70 * MIB)
    long = tmp_path / "long.jsonl"
    with long.open("wb") as out:
        out.truncate(100 * MIB)  # one line of zeros
    told = list(documents(long, Position()))[-1].raw
    assert isinstance(told, RowProblem)
    assert "MiB" in told.reason


def test_a_line_without_an_end_is_left_and_the_file_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SKIPPED_BYTES", 70 * MIB)
    path = tmp_path / "long.jsonl"
    with path.open("wb") as out:
        out.write(b'{"src": "a", "tgt": "b"}\n')
        out.truncate(200 * MIB)
    found = bounded(lambda: read_all(path))
    assert [p.line for p in found] == [2]
    assert "the rest of the file is not read" in found[0].reason


def test_a_row_over_the_limit_costs_only_itself(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = b'{"src": "a", "tgt": "b"}\n'
    path.write_bytes(good + b"x" * (3 * MIB) + b"\n" + good)
    assert [number for number, raw in rows(path, MIB) if isinstance(raw, bytes)] == [1, 3]


def idx(sequences: int, entries: int, body: bytes = b"", code: int = 8) -> bytes:
    return struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, sequences, entries) + body


def npy(shape: object, descr: str = "<i4", body: bytes = b"", version: int = 1) -> bytes:
    head = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(head))
    return b"\x93NUMPY" + bytes([version, 0]) + size + head + body


def npz(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return out.getvalue()


TOKENS = npy((2,), body=bytes(8))
LENS = npy((1,), body=struct.pack("<i", 2))
LYING = {
    "counts beyond the file": {"a.idx": idx(1 << 60, 1 << 60), "a.bin": b""},
    "the largest counts": {"a.idx": idx((1 << 64) - 1, (1 << 64) - 1), "a.bin": b""},
    "negative sizes": {"a.idx": idx(1, 2, struct.pack("<iqqq", -5, 0, 0, 1)), "a.bin": b""},
    "pointers elsewhere": {"a.idx": idx(1, 2, struct.pack("<iqqq", 2, 1 << 40, 0, 1)), "a.bin": bytes(4)},
    "documents backwards": {"a.idx": idx(1, 3, struct.pack("<iqqqq", 2, 0, 0, 9, 1)), "a.bin": bytes(4)},
    "an unknown dtype": {"a.idx": idx(0, 0, code=99), "a.bin": b""},
    "a header cut short": {"a.idx": b"MMIDIDX\x00\x00\x01", "a.bin": b""},
    "lens of terabytes": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=npy((10**12,)))},
    "lens that unpack to much": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=LENS + bytes(80 * MIB))},
    "lens of objects": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=npy((1,), "|O", b"cos\nsystem\n(S'x'\ntR."))},
    "lens of fractions": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=npy((1,), "<f4", bytes(4)))},
    "lens in two dimensions": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=npy((1, 1), body=bytes(4)))},
    "negative lens": {"a_ids.npy": TOKENS, "a_idx.npz": npz(lens=npy((2,), body=struct.pack("<ii", 9, -7)))},
    "no zip": {"a_ids.npy": TOKENS, "a_idx.npz": b"PK\x03\x04 and no more"},
    "a pickle for an index": {"a_ids.npy": TOKENS, "a_idx.npz": b"cos\nsystem\n(S'x'\ntR."},
    "tokens of no number": {"a_ids.npy": npy(("x",)), "a_idx.npz": npz(lens=LENS)},
    "fewer tokens than none": {"a_ids.npy": npy((-2,)), "a_idx.npz": npz(lens=LENS)},
    "a shape of brackets": {"a_ids.npy": npy(2, version=2).replace(b"2, }", b"(" * 5000), "a_idx.npz": npz(lens=LENS)},
    "a header of gigabytes": {"a_ids.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "a_idx.npz": npz(lens=LENS)},
    "tokens that are objects": {"a_ids.npy": npy((2,), "|O", bytes(16)), "a_idx.npz": npz(lens=LENS)},
}


def test_token_files_whose_counts_lie_are_refused_by_name(tmp_path):
    with fault("P3", "Megatron and numpy token files whose counts and shapes lie") as row:
        for what, content in LYING.items():
            row.count += 1
            folder = tmp_path / str(row.count)
            folder.mkdir()
            for name, raw in content.items():
                (folder / name).write_bytes(raw)
            began = time.process_time()
            with pytest.raises(DataError) as caught:
                mmap_files.open_files(str(folder / "a"))
            assert within(time.process_time() - began, 2), what
            assert str(folder) in caught.value.where, what
            row.hits += 1


def test_a_sound_numpy_pair_is_still_read(tmp_path):
    np.save(tmp_path / "a_ids.npy", np.arange(5, dtype=np.int32))
    np.savez(tmp_path / "a_idx.npz", lens=np.array([2, 3], dtype=np.int32), docs=np.array([0, 1, 2]))
    files = mmap_files.open_files(str(tmp_path / "a"))
    assert files.num_tokens == 5
    assert files.tokens(2, 3).tolist() == [2, 3, 4]


SEEDS = [
    {"src": "a", "tgt": "b"},
    {"src": ["a", "c"], "tgt": ["b", "d"], "label": [1, 0]},
    {"instruction": "a", "input": "", "output": "b", "history": [["a", "b"]]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"src": ["a"], "tgt": [], "response": [["b"], ["c"]], "sort": [1, 0]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
]
ODD = [None, "", 0, -1, 10**30, True, 1.5, [], {}, [[]], [None], [{}], "\ud800", {"content": {}}, [["a"]], "x" * 5000]


def mutated(dice: random.Random) -> object:
    row = json.loads(json.dumps(dice.choice(SEEDS)))
    for _ in range(dice.randint(1, 3)):
        at: object = row
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            if not keys:
                break
            key = dice.choice(keys)
            if dice.random() < 0.5 or not isinstance(at[key], dict | list):
                if dice.random() < 0.2:
                    del at[key]
                else:
                    at[key] = dice.choice(ODD)
                break
            at = at[key]
    return row if dice.random() < 0.95 else dice.choice(ODD)


@pytest.mark.parametrize("count", [400, pytest.param(40_000, marks=pytest.mark.full)])
def test_rows_of_every_format_with_values_of_every_kind_are_read_or_named(tmp_path, capsys, count):
    """`erniekit data` on files of mutated rows: bad rows are counted, never a fault of ours."""
    with fault("P3", "rows of every format with values of every kind") as row:
        dice = random.Random(7)
        for kind in ("erniekit", "alpaca", "messages", "chatml", ""):
            path = tmp_path / f"{kind or 'any'}.jsonl"
            with path.open("w") as out:
                for _ in range(count // 5):
                    row.count += 1
                    out.write(json.dumps(mutated(dice)) + "\n")
            capsys.readouterr()
            code = main(["data", str(path), *(["--type", kind] if kind else [])])
            said = capsys.readouterr()
            assert code in (0, 1, 2), said.err  # 1: rows that cannot be used
            assert "fault of erniekit" not in said.err, said.err
            row.hits = row.count


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_files_with_bytes_changed_at_random_are_read_or_named(tmp_path, count):
    with fault("P3", "files of every kind with bytes changed at random") as row:
        dice = random.Random(11)
        plain = b"".join(json.dumps(seed).encode() + b"\n" for seed in SEEDS) * 20
        sources = {"a.jsonl": plain, "a.json": json.dumps(SEEDS * 20).encode(), "a.jsonl.gz": gzip.compress(plain)}
        try:
            import pyarrow
            from pyarrow import parquet

            table = io.BytesIO()
            parquet.write_table(pyarrow.table({"src": ["a"] * 100, "tgt": ["b"] * 100}), table)
            sources["a.parquet"] = table.getvalue()
        except ImportError:
            pass
        for name, content in sources.items():
            for _ in range(count):
                row.count += 1
                raw = bytearray(content)
                for _ in range(dice.randint(1, 8)):
                    raw[dice.randrange(len(raw))] = dice.randrange(256)
                path = tmp_path / name
                path.write_bytes(raw[: dice.randint(1, len(raw))] if dice.random() < 0.3 else raw)
                try:
                    read_all(path)
                except ErnieKitError as error:
                    row.note = error.what[:0]
                row.hits += 1
        row.note = "every row read, or named with its line"
