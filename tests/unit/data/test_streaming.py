"""Sources that are read while they are used: the order of the whole file, whoever reads and wherever it was stopped."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from erniekit.data import stream_source
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.storage import StoredFile, web
from erniekit.data.stream_order import StreamOrder, StreamPacks
from erniekit.data.stream_source import StreamSource, file_versions, stream_fingerprint
from erniekit.data.stream_store import IDS, StreamStore
from erniekit.data.token_cache import cache_key
from erniekit.errors import DataError
from support.jsonl import write_jsonl
from support.sources import row_job

SIZES = (42, 25)
CHUNK = 8


def said(name: str, number: int) -> dict:
    return {"src": [f"question {number} of {name}"], "tgt": [f"answer {number} " * (1 + number % 5)]}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_source, "CHUNK_ROWS", CHUNK)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [
        write_jsonl(tmp_path / f"{name}.jsonl", [said(name, n) for n in range(size)]) for name, size in zip("ab", SIZES)
    ]


@pytest.fixture
def streamed(tokenizer, tmp_path: Path) -> Callable[..., StreamSource]:
    """streamed(path, ..., store=folder's name) -> their source."""

    def call(*paths: Path, store: str = "", bad: float = 0.0, listed: Path | None = None) -> StreamSource:
        names = [str(path) for path in paths]

        def job_of(path: str):
            return row_job(path, None, tokenizer, max_seq_len=96)

        versions = file_versions(names)
        key = stream_fingerprint(versions, lambda content: cache_key(job_of(names[0]), content))
        kept = StreamStore(tmp_path / "streams" / (store or key))
        return StreamSource(names[0], names, job_of, key, kept, bad, versions, listed)

    return call


@pytest.mark.parametrize(
    ("count", "options", "packing"),
    [
        (1, {"shuffle": False}, {}),
        (1, {"shuffle": True}, {"packing": False}),  # blocks are larger than the file
        (2, {"shuffle": False}, {"greedy": False}),
        (2, {"shuffle": True, "probs": [0.7, 0.3]}, {}),
        (2, {"shuffle": False, "strategy": "concat"}, {"greedy": False}),
    ],
)
def test_packs_are_those_of_files_that_were_read_first(
    count: int, options: dict, packing: dict, files, streamed, opened
) -> None:
    whole, sources = [opened(path) for path in files[:count]], [streamed(path) for path in files[:count]]
    probs = options.pop("probs", None)
    want = PackStream(
        SampleOrder([len(s) for s in whole], probs, seed=5, **options), [s.lengths for s in whole], 96,
        buffer_size=16, **packing,
    )  # fmt: skip
    got = StreamPacks(StreamOrder(sources, probs, seed=5, **options), sources, 96, 2, 4, buffer_size=16, **packing)
    for number in range(90 if packing else 30):  # more than two passes
        assert got[number] == want[number], number
    for index in range(SIZES[0]):
        assert np.array_equal(sources[0].sample(index).ids, whole[0].sample(index).ids)
        assert np.array_equal(sources[0].sample(index).labels, whole[0].sample(index).labels)


def test_rows_are_shuffled_within_blocks_and_every_pass_has_each_once(files, streamed) -> None:
    source = streamed(files[0])
    order = StreamOrder([source], seed=1, block=16)
    first = order.take(0, 16)[1]
    assert sorted(first) == list(range(16))
    assert list(first) != list(range(16))
    assert len(source) < SIZES[0], "no more was read than the block needs"
    both = order.take(0, 42)[1], order.take(42, 42)[1]
    assert sorted(both[0]) == sorted(both[1]) == list(range(42))
    assert list(both[0]) != list(both[1])


def test_no_row_is_read_before_it_is_needed(files, streamed) -> None:
    source = streamed(files[0])
    assert source.require(3)
    assert len(source) == CHUNK
    assert source.size is None
    assert source.report.so_far
    assert source.report.rows == CHUNK
    assert not source.require(1000)
    assert source.size == SIZES[0]
    assert not source.report.so_far


def test_files_of_one_entry_follow_each_other(files, streamed, opened) -> None:
    source = streamed(*files)
    assert not source.require(1000)
    want = [opened(path).sample(i).ids for path, size in zip(files, SIZES) for i in range(size)]
    assert all(np.array_equal(source.sample(i).ids, ids) for i, ids in enumerate(want))
    assert source.report.rows == source.size == sum(SIZES)


def test_an_object_store_is_streamed_by_its_files(files, streamed, opened) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for path in files:
        store.pipe(f"/streamed/{path.name}.gz", gzip.compress(path.read_bytes()))
    source = streamed(*(f"memory://streamed/{path.name}.gz" for path in files))
    assert source.require(SIZES[0] + 1)
    first = opened(files[1]).sample(0)
    assert np.array_equal(source.sample(SIZES[0]).ids, first.ids)
    assert source.report.file == "memory://streamed/a.jsonl.gz"
    before = source.fingerprint
    store.pipe("/streamed/b.jsonl.gz", gzip.compress(b"{}"))
    assert streamed(*source.files).fingerprint != before


def test_a_reader_that_is_gone_is_followed_where_it_stopped(files, streamed, opened) -> None:
    first = streamed(*files)
    first.require(50)  # in the second file
    read = len(first)
    first.close()
    store = StreamStore(first._store.folder)
    with open(store.folder / IDS, "ab") as file:
        file.write(b"what a killed process had begun to write")
    second = streamed(*files)
    assert not second.require(1000)
    assert read < sum(SIZES)
    want = [opened(path).sample(i).ids for path, size in zip(files, SIZES) for i in range(size)]
    assert all(np.array_equal(second.sample(i).ids, ids) for i, ids in enumerate(want))
    assert second.report.rows == sum(SIZES)


def test_damaged_samples_are_read_again(files, streamed, opened) -> None:
    first = streamed(files[0])
    first.require(40)
    folder = first._store.folder
    first.close()
    with open(folder / IDS, "r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 8)
    second = streamed(files[0])
    assert second.require(40)
    assert np.array_equal(second.sample(2).ids, opened(files[0]).sample(2).ids)
    assert second.report.rows == len(second) == 40  # none twice


def test_one_process_reads_and_the_others_wait_for_it(files, streamed) -> None:
    """Two stores on one folder have locks of their own, as two ranks have."""
    reader, other = streamed(files[0]), streamed(files[0])
    assert reader.require(1)
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(other.require(20)))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert not other._store.writes
    reader.require(20)
    waiting.join(60)
    assert got == [True]
    assert np.array_equal(other.sample(19).ids, reader.sample(19).ids)
    reader.close()  # or killed: the other reads on
    assert not other.require(1000)
    assert other._store.writes
    assert other.size == SIZES[0]


def test_another_version_of_a_file_is_another_source(files, streamed) -> None:
    before = streamed(files[0]).fingerprint
    copy = files[0].with_name("copy.jsonl")
    copy.write_bytes(files[0].read_bytes())
    assert streamed(copy).fingerprint == before
    files[0].write_bytes(files[0].read_bytes() + b"\n")
    assert streamed(files[0]).fingerprint != before


def test_bad_rows_stop_it_as_soon_as_there_are_too_many(tmp_path, streamed) -> None:
    rows = [said("c", n) if n % 9 else {"src": ["?"]} for n in range(60)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    with pytest.raises(DataError, match=r"1 of 8 rows of .* cannot be used"):
        streamed(path, store="strict").require(50)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(DataError) as error:
        streamed(path, store="listed", listed=run / "bad_rows.jsonl").require(50)
    assert str(run / "bad_rows.jsonl") in error.value.fix
    assert len((run / "bad_rows.jsonl").read_text().splitlines()) == 1
    patient = streamed(path, store="patient", bad=0.2)
    assert not patient.require(1000)
    assert patient.report.bad_rows == 7
    patient.list_bad_rows(tmp_path / "bad_rows.jsonl", append=False)
    assert len((tmp_path / "bad_rows.jsonl").read_text().splitlines()) == 7


def test_a_file_without_a_usable_row_is_refused(tmp_path, streamed) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"src": ["word " * 200], "tgt": ["word " * 200]}])
    with pytest.raises(DataError, match="gives no usable sample"):
        streamed(path).require(1)


def test_a_file_that_is_replaced_before_its_turn_is_refused(files, streamed) -> None:
    source = streamed(*files)
    source.require(1)
    write_jsonl(files[1], [said("other", n) for n in range(7)])
    with pytest.raises(DataError, match="changed since the run began"):
        source.require(SIZES[0] + 1)


def test_rows_that_are_not_those_read_before_are_refused(files, streamed, monkeypatch) -> None:
    """Of a place that names no version the address is the same, the rows are not."""
    monkeypatch.setattr(StoredFile, "names_version", False)
    first = streamed(files[0], store="same")
    first.require(1)
    first.close()
    write_jsonl(files[0], [said("A", n) for n in range(SIZES[0])])
    with pytest.raises(DataError, match="not those that were read before"):
        streamed(files[0], store="same").require(CHUNK + 1)


def test_a_chunk_that_could_not_be_stored_is_read_again(files, streamed, opened, monkeypatch) -> None:
    source = streamed(files[0])
    source.require(1)
    append = StreamStore._append

    def full(store: StreamStore, *args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StreamStore, "_append", full)
    with pytest.raises(DataError, match="No space left"):
        source.require(CHUNK + 1)
    monkeypatch.setattr(StreamStore, "_append", append)
    assert not source.require(SIZES[0] + 1)
    whole = opened(files[0])
    assert [source.sample(i).ids.tolist() for i in range(len(source))] == [
        whole.sample(i).ids.tolist() for i in range(len(whole))
    ]


def test_files_of_others_in_the_folder_of_a_stream_are_not_written(files, streamed, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.txt"
    theirs.write_text("theirs")
    linked = tmp_path / "streams" / "linked"
    linked.mkdir(parents=True)
    (linked / IDS).symlink_to(theirs)
    with pytest.raises(DataError, match="cannot be written"):
        streamed(files[0], store="linked").require(1)
    plain = tmp_path / "streams" / "plain"
    plain.mkdir()
    (plain / IDS).write_text("theirs")
    with pytest.raises(DataError, match="no run of erniekit wrote"):
        streamed(files[0], store="plain").require(1)
    assert theirs.read_text() == (plain / IDS).read_text() == "theirs"


@pytest.mark.parametrize("removed", range(1, 7))
def test_a_run_that_was_killed_while_it_removed_its_samples_begins_again(
    removed: int, files, streamed, monkeypatch
) -> None:
    first = streamed(files[0], store="same")
    first.require(1)
    unlink, left = Path.unlink, [removed]

    def killed(path: Path, missing_ok: bool = False) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            first.discard()
    first.close()
    assert not streamed(files[0], store="same").require(SIZES[0] + 1)


class Parts(BaseHTTPRequestHandler):
    """A file, and from which byte on it was asked for."""

    content, ranges, starts = b"", True, []

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._head(0)

    def do_GET(self) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0]) if self.ranges else 0
        self.starts.append(start)
        self._head(start)
        try:
            self.wfile.write(self.content[start:])
        except OSError:
            pass  # a reader that has enough

    def _head(self, start: int) -> None:
        self.send_response(206 if start else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()


@pytest.fixture
def served() -> Iterator[tuple[str, type[Parts]]]:
    handler = type("OneFile", (Parts,), {"starts": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", handler
        server.shutdown()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_reader_that_goes_on_asks_the_server_for_the_rest_alone_if_it_sends_parts(
    ranges: bool, served, streamed: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_TRIES", 1)
    url, handler = served
    rows = [said("far", n) | {"x": "-" * 40_000} for n in range(100)]  # 4 MB, of which the head is always looked at
    rows[20:20] = [{"no": 1}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    handler.content, handler.ranges = path.read_bytes(), ranges
    first = streamed(url, bad=0.5)
    first.require(60)
    place = first._store.progress.place
    assert place is not None
    assert handler.content[place[0] - 1 : place[0]] == b"\n"
    read = len(first)
    first.close()
    handler.starts.clear()
    again = streamed(url, bad=0.5)
    assert len(again) == read >= 60
    again.require(1000)
    assert again.size == 100
    if ranges:
        assert place[0] in handler.starts
        assert all(start == 0 or start >= place[0] - 1 for start in handler.starts), handler.starts
    local = streamed(path, store="local", bad=0.5)
    local.require(1000)
    assert [again.sample(i).ids.tolist() for i in range(100)] == [local.sample(i).ids.tolist() for i in range(100)]
    assert again.report.bad == local.report.bad
    assert again.report.first_bad[0].line == 21


def test_a_file_that_breaks_off_stops_the_reading_unless_all_bad_rows_are_taken(
    tmp_path: Path, streamed: Callable[..., StreamSource]
) -> None:
    whole = json.dumps([said("a", n) for n in range(400)])
    (cut := tmp_path / "cut.json").write_text(whole[:-20])
    listed = tmp_path / "run" / "bad_rows.jsonl"
    listed.parent.mkdir()
    with pytest.raises(DataError, match=r"cannot be read to its end; 399 rows before were"):
        streamed(cut, store="strict", bad=0.5, listed=listed).require_tokens(10**9)
    assert len(listed.read_text().splitlines()) == 1
    listed.unlink()
    taken = streamed(cut, store="all", bad=1.0, listed=listed)
    assert not taken.require_tokens(10**9), "it ends"
    assert taken.report.bad == {"unreadable": 1}
    assert not listed.exists(), "rows that stop nothing are listed with those of the other sources"
