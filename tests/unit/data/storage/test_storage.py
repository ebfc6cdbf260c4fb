"""Folders, patterns, URLs and object stores: the same rows in the same order as the file they hold, resumed exactly."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.formats import rows
from erniekit.data.storage import as_place, is_remote, listed_files, located
from erniekit.data.types import RowProblem
from erniekit.errors import DataError
from support.jsonl import write_jsonl
from support.sources import open_source

ROWS = [{"src": [f"question {n} of many"], "tgt": [f"answer {n}"]} for n in range(300)]


class Site(BaseHTTPRequestHandler):
    """One file, with versions and ranges; every connection ends after `most` bytes."""

    content, most, tag, asked, heads = b"", 1 << 30, '"1"', [], 0
    part = length = ""  # headers that are not true
    for_get_alone, ranges = False, True

    def log_message(self, *args: object) -> None:
        pass

    def _head(self, start: int) -> None:
        self.send_response(206 if start else 200)
        if self.tag:
            self.send_header("ETag", self.tag)
        if start and self.part:
            self.send_header("Content-Range", self.part)
        self.send_header("Content-Length", self.length or str(len(self.content) - start))
        self.end_headers()

    def do_HEAD(self) -> None:
        type(self).heads += 1
        if self.for_get_alone:
            self.send_error(403)
            return
        self._head(0)

    def do_GET(self) -> None:
        if self.path == "/missing.jsonl":
            self.send_error(404)
            return
        asked = self.headers.get("Range", "bytes=0-")
        if asked == "bytes=0-0" and self.ranges:
            self.send_response(206)
            self.send_header("ETag", self.tag)
            self.send_header("Content-Range", f"bytes 0-0/{len(self.content)}")
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(self.content[:1])
            return
        start = int(asked[6:].partition("-")[0])
        type(self).asked.append(start)
        self._head(start)
        self.wfile.write(self.content[start : start + self.most])


@pytest.fixture
def site() -> Iterator[tuple[str, type[Site]]]:
    handler = type("OneSite", (Site,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


def samples(source) -> list[np.ndarray]:
    return [source.sample(i).ids for i in range(len(source))]


def test_a_url_gives_the_rows_of_the_file(site, local, opened) -> None:
    address, handler = site
    handler.content = local.read_bytes()
    url = f"{address}/rows.jsonl?token=1"
    assert list(rows(url)) == list(rows(local))
    there, here = opened(url), opened(local)
    assert all(map(np.array_equal, samples(there), samples(here)))
    assert there.report.rows == 300


def test_a_lost_connection_is_continued_where_it_broke(site, local) -> None:
    address, handler = site
    handler.content, handler.most = local.read_bytes(), 7_000
    assert list(rows(f"{address}/rows.jsonl")) == list(rows(local))
    assert len(handler.asked) >= 3
    assert handler.asked[1] == 7_000


@pytest.mark.parametrize("ranges", [True, False])
def test_an_address_that_is_signed_for_get_alone_is_read(ranges: bool, site, local) -> None:
    address, handler = site
    handler.content, handler.for_get_alone, handler.ranges = local.read_bytes(), True, ranges
    assert located(f"{address}/rows.jsonl").size() == len(handler.content)
    assert list(rows(f"{address}/rows.jsonl")) == list(rows(local))


@pytest.mark.parametrize("length", ["abc", "-5", "9" * 40, "\u00b2"])
def test_a_length_that_is_no_number_is_not_known(length: str, site, local) -> None:
    address, handler = site
    handler.content, handler.length = local.read_bytes(), length
    assert located(f"{address}/rows.jsonl").size() == 0


def test_another_part_than_was_asked_for_is_not_taken_for_it(site, local) -> None:
    address, handler = site
    handler.content, handler.most, handler.part = local.read_bytes(), 5000, "bytes 0-4999/20000"
    *good, (_, last) = rows(f"{address}/rows.jsonl")
    assert isinstance(last, RowProblem)
    assert "another part" in last.reason
    assert good == list(rows(local))[: len(good)]


def test_the_second_opening_reads_the_cache_and_another_version_does_not(site, local, opened, no_tokenising) -> None:
    address, handler = site
    handler.content = local.read_bytes()
    url = f"{address}/rows.jsonl"
    first = opened(url)
    handler.tag = '"2"'
    assert opened(url).fingerprint != first.fingerprint
    handler.tag = '"1"'
    no_tokenising()
    handler.asked.clear()
    handler.heads = 0
    assert opened(url).fingerprint == first.fingerprint
    assert handler.asked == [0]  # its first rows, for the format
    assert handler.heads == 2  # before those rows, and for the version


def test_a_server_that_names_no_version_is_compared_by_content(site, local, opened) -> None:
    address, handler = site
    handler.content, handler.tag = local.read_bytes(), ""
    first = opened(f"{address}/rows.jsonl").fingerprint
    handler.content += b"\n"
    assert opened(f"{address}/rows.jsonl").fingerprint != first


def test_parquet_is_read_by_its_parts(site, tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    address, handler = site
    handler.content = (tmp_path / "a.parquet").read_bytes()
    assert [row for _, row in rows(f"{address}/a.parquet")] == ROWS


def test_what_is_not_there_is_said_with_its_address(site) -> None:
    address, _ = site
    with pytest.raises(DataError, match="dataset cannot be read") as refused:
        list(rows("http://127.0.0.1:9/rows.jsonl"))
    assert "127.0.0.1:9" in refused.value.where
    with pytest.raises(DataError, match="Not Found"):
        list(rows(f"{address}/missing.jsonl"))


def test_an_object_store_gives_the_rows_of_the_file(local, opened) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("b", "a"):
        store.pipe(f"/sets/{name}.jsonl", local.read_bytes())
    store.pipe("/sets/README.md", b"not data")
    assert list(rows("memory://sets/a.jsonl")) == list(rows(local))
    assert [file.path for file in listed_files(["memory://sets"])] == [
        "memory:///sets/a.jsonl",
        "memory:///sets/b.jsonl",
    ]
    assert len(listed_files(["memory://sets/*.jsonl"])) == 2
    source = opened("memory://sets/a.jsonl")
    assert all(map(np.array_equal, samples(source), samples(opened(local))))
    with pytest.raises(DataError, match="cannot be read"):
        list(rows("memory://sets/none.jsonl"))
    with pytest.raises(DataError, match="no reader for nosuch://"):
        located("nosuch://sets/a.jsonl")


def test_a_file_url_is_a_file_and_windows_of_words_are_told_apart(local) -> None:
    assert as_place(f"file://{local}") == local
    assert is_remote("owner/name?split=test")
    assert not is_remote("data/rows.jsonl")
    assert not is_remote(str(local))


@pytest.mark.parametrize("address", ["file://rows.jsonl", "file://store/rows.jsonl", "file://", "file://[::1"])
def test_a_file_url_that_names_a_machine_is_refused(address: str, tmp_path: Path, monkeypatch) -> None:
    """Its path alone was taken before: of file://rows.jsonl that is the folder one stands in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(DataError, match="begins with file:///") as error:
        listed_files([address])
    assert error.value.where == address


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match="this is no address") as error:
        located("https://[::1/rows.jsonl")
    assert error.value.where == "https://[::1/rows.jsonl"


def test_folders_and_patterns_are_their_files_by_name(tmp_path: Path, caplog, capsys) -> None:
    for name in ("b/2.jsonl", "a.json", "c.csv", ".hidden/x.jsonl", "notes.md", "dataset_info.json", "t.txt"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    names = [str(Path(file.path).relative_to(tmp_path / "set")) for file in listed_files([tmp_path / "set"])]
    assert names == ["a.json", "b/2.jsonl", "c.csv"]
    assert "notes.md" in capsys.readouterr().err + caplog.text
    text = [Path(file.path).name for file in listed_files([tmp_path / "set"], text=True)]
    assert "t.txt" in text
    found = listed_files([str(tmp_path / "set" / "*.csv"), str(tmp_path / "set" / "**" / "*.jsonl")])
    assert [(Path(file.path).name, file.entry) for file in found] == [("c.csv", 0), ("2.jsonl", 1)]
    with pytest.raises(DataError, match="no file matches"):
        listed_files([str(tmp_path / "*.none")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no dataset file"):
        listed_files([tmp_path / "empty"])


@pytest.mark.parametrize("whole", ["/", "//", "/tmp/.."])
def test_the_whole_disk_is_no_dataset(whole: str) -> None:
    with pytest.raises(DataError, match="the whole disk is no dataset") as error:
        listed_files([whole])
    assert error.value.where == str(Path(whole))


def test_folders_with_a_dot_are_not_looked_into_and_others_must_be_readable(tmp_path: Path, monkeypatch) -> None:
    """Caches and repositories may hold many files, and what nobody may read."""
    for name in ("a.jsonl", "below/b.jsonl", ".git/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, ROWS[:1])
    scanned, scandir = [], os.scandir

    def scan(place: str) -> object:
        scanned.append(Path(place))
        if Path(place) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(place)

    closed = tmp_path / ".git"
    monkeypatch.setattr(os, "scandir", scan)
    assert [file.path for file in listed_files([tmp_path])] == [tmp_path / "a.jsonl", tmp_path / "below/b.jsonl"]
    assert scanned == [tmp_path, tmp_path / "below"]
    closed = tmp_path / "below"  # a superuser's tests may read every folder there is
    with pytest.raises(DataError, match="cannot be read: Permission denied") as error:
        listed_files([tmp_path])
    assert error.value.where == str(closed)


@pytest.mark.parametrize("name", ["b.jsonl", "below/b.csv.gz", "part"])
def test_a_link_to_nowhere_in_a_folder_is_read_and_refused_as_when_it_is_named(name: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("gone")
    for entry in (tmp_path, tmp_path / "**" / "*"):
        assert {file.path for file in listed_files([str(entry)])} == {tmp_path / "a.jsonl", link}
    with pytest.raises(DataError, match="dataset is a link to gone, which does not exist") as error:
        located(link).open()
    assert error.value.where == str(link)


def test_a_link_to_nowhere_is_no_dataset_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_remote("owner/name")
    Path("owner").mkdir()
    Path("owner/name").symlink_to("gone")
    assert not is_remote("owner/name")


def test_a_pipe_in_a_folder_is_read_and_refused_as_when_it_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    os.mkfifo(tmp_path / "b.jsonl")
    for entry in (tmp_path, tmp_path / "*.jsonl"):
        assert [Path(file.path).name for file in listed_files([str(entry)])] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match="is a named pipe"):
        located(tmp_path / "b.jsonl").open()


@pytest.mark.parametrize("content", ["", "\n", " \n\t\r\n"])
def test_a_file_of_a_folder_that_holds_nothing_is_named_and_passed_over(
    content: str, tmp_path: Path, caplog, capsys
) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    (tmp_path / "b.jsonl").write_text(content)
    assert [file.path for file in listed_files([tmp_path])] == [tmp_path / "a.jsonl"]
    assert "not read: b.jsonl (empty)" in capsys.readouterr().err + caplog.text


def test_what_holds_no_data_is_passed_over_and_a_linked_folder_is_named(tmp_path: Path, caplog, capsys) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", ROWS[:1])
    (folder / "notes.md").symlink_to("gone")
    (folder / ".b.jsonl").symlink_to("gone")
    os.mkfifo(folder / "control")
    (folder / "more").symlink_to(tmp_path)
    assert [file.path for file in listed_files([folder])] == [folder / "a.jsonl"]
    assert "not read: control, more (a link to a folder), notes.md" in capsys.readouterr().err + caplog.text


def test_a_cache_that_is_lost_is_made_again_the_same(site, local, tokenizer, tmp_path) -> None:
    address, handler = site
    handler.content = local.read_bytes()
    made = [
        open_source(f"{address}/rows.jsonl", None, tokenizer, max_seq_len=96, cache_dir=tmp_path / name, num_proc=1)
        for name in ("one", "two")
    ]
    assert made[0].fingerprint == made[1].fingerprint
    assert all(map(np.array_equal, samples(made[0]), samples(made[1])))


class Guarded(BaseHTTPRequestHandler):
    """Rows for who has the password; /away sends its readers to `target`."""

    content, target, heard = b"", "", []

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        type(self).heard.append(self.headers.get("Authorization"))
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", self.target)
            self.end_headers()
            return
        allowed = self.headers.get("Authorization") == "Basic bWU6c2VzYW1l"  # me:sesame
        self.send_response(200 if allowed else 401)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET


@pytest.fixture
def guarded() -> Iterator[tuple[str, type[Guarded]]]:
    handler = type("OneGuarded", (Guarded,), {"heard": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_a_password_in_the_address_is_sent_and_not_shown(guarded, local) -> None:
    host, handler = guarded
    handler.content = local.read_bytes()
    url = f"http://me:sesame@{host}/rows.jsonl"
    assert list(rows(url)) == list(rows(local))
    assert str(located(url)) == f"http://***@{host}/rows.jsonl"
    with pytest.raises(DataError, match="Unauthorized") as refused:
        list(rows(f"http://me:wrong-word@{host}/rows.jsonl"))
    assert "wrong-word" not in str(refused.value)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/rows.jsonl", "gopher://127.0.0.1/"])
def test_a_redirect_to_another_protocol_is_refused(target: str, guarded) -> None:
    host, handler = guarded
    handler.target = target
    with pytest.raises(DataError, match=r"redirects to|Redirection to url .* is not allowed"):
        list(rows(f"http://{host}/away.jsonl"))


def test_a_redirect_to_another_host_takes_no_password_along(guarded, site, local) -> None:
    (host, handler), (address, other) = guarded, site
    other.content = local.read_bytes()
    handler.target = f"{address}/rows.jsonl"
    heard: list[str | None] = []
    plain = other.do_HEAD

    def do_HEAD(self: Site) -> None:
        heard.append(self.headers.get("Authorization"))
        plain(self)

    other.do_HEAD = do_HEAD  # type: ignore[method-assign]
    assert located(f"http://me:sesame@{host}/away.jsonl").size() == len(other.content)
    assert handler.heard == ["Basic bWU6c2VzYW1l"]
    assert heard == [None]


def test_an_address_signed_anew_is_the_same_data(site, local, opened, no_tokenising) -> None:
    address, handler = site
    handler.content = local.read_bytes()
    signed = "{}/rows.jsonl?versionId=3&X-Amz-Date={}&X-Amz-Signature={}"
    first = opened(signed.format(address, "20260101", "aaaaaaaa"))
    no_tokenising()
    again = opened(signed.format(address, "20260202", "bbbbbbbb"))
    assert again.fingerprint == first.fingerprint
    assert again.report.file == f"{address}/rows.jsonl?versionId=3&***"
    assert again.path.endswith("bbbbbbbb")
    with pytest.raises(DataError, match="stored without its password or signature") as refused:
        opened(again.report.file)
    assert "train_dataset_path=URL" in refused.value.fix
