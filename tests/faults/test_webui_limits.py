"""W4: the real page on a real port, sent more than it takes: bodies, requests, streams and uploads without end."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[webui]'")
pytest.importorskip("uvicorn")

from erniekit.webui import limits
from faults.page_server import JOIN, UPLOAD, Door, Served, served
from faults.results import fault

pytestmark = pytest.mark.xdist_group("webui requests")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("page")) as page:
        yield page


def send(door: Door, path: str, head: str, parts: list[bytes]) -> str:
    """What comes back, its first line; a server that has heard enough may hang up before all is sent."""
    with door.raw() as raw:
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in door.headers().items()), head, "", ""]
        raw.sendall("\r\n".join(lines).encode())
        try:
            for part in parts:
                raw.sendall(part)
        except OSError:
            pass
        return raw.makefile("rb").readline().decode()


def test_bodies_beyond_the_limit_are_refused_however_they_are_sent(page: Served) -> None:
    door = page.guarded
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with fault("W4", "bodies beyond the limit, by their length and in chunks") as row:
        for path in limits.POSTS:
            most = limits.MAX_UPLOAD if path == UPLOAD else limits.MAX_BODY
            for told in (200_000_000, most + 1, 10**15):
                assert " 413 " in send(door, path, f"Content-Length: {told}", []), (path, told)
                row.count += 1
            assert " 413 " in send(door, path, "Transfer-Encoding: chunked", [chunk] * (most // 0x10000 + 1)), path
            row.count += 1
        assert not [p for p in page.uploads.rglob("*") if p.is_file() and p.stat().st_size > limits.MAX_FILE]
        assert door.ask("GET", "/config").status == 200
        row.hits = row.count
        row.note = "413 each time"


def test_what_the_page_never_sends_is_closed(page: Served) -> None:
    for path in ("/gradio_api/run/predict", "/gradio_api/api/predict", "/gradio_api/call/x", "/gradio_api/call/v2/x",
                 "/gradio_api/component_server", "/gradio_api/process_recording", "/gradio_api/vibe-edit/",
                 "/gradio_api/stream/x", "/login"):  # fmt: skip
        assert page.guarded.ask("POST", path, b"{}").status == 403, path
    for path in ("/gradio_api/deep_link?session_hash=x", "/gradio_api/proxy=http://127.0.0.1:9/x"):
        assert page.guarded.ask("GET", path).status == 403, path
    assert page.guarded.ask("PUT", JOIN, b"{}").status == 403


def test_a_body_that_is_no_json_or_nests_without_end_is_refused(page: Served) -> None:
    for body in (b"{", b"\xff", b"[" * 500_000, b'{"path":' * 90_000):
        assert page.guarded.ask("POST", JOIN, body).status == 400


def test_a_body_that_does_not_come_is_given_up(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_S", 0.3)
    monkeypatch.setattr(limits, "UPLOAD_S", 0.3)
    with fault("W4", "bodies that stop half way") as row:
        for path in limits.POSTS:
            began = time.monotonic()
            assert " 408 " in send(page.guarded, path, "Content-Length: 1000", [b"x" * 500])
            assert time.monotonic() - began < 25  # of 30 that the client itself would wait
            row.count += 1
        row.hits = row.count
        row.note = "408 each time"


def test_of_sixty_uploads_at_once_most_are_told_to_come_back(page: Served) -> None:
    door, many = page.guarded, 60
    lines = [f"POST {UPLOAD} HTTP/1.1", *(f"{k}: {v}" for k, v in door.headers().items())]
    lines += ["Content-Type: multipart/form-data; boundary=edge", "Content-Length: 100", "", "x"]
    with fault("W4", "sixty uploads at once") as row, ExitStack() as open_ones:
        sockets = [open_ones.enter_context(door.raw()) for _ in range(many)]
        for one in sockets:
            one.sendall("\r\n".join(lines).encode())
        replies: list[bytes] = []
        end = time.monotonic() + 60
        while len(replies) < many - limits.MAX_UPLOADS and time.monotonic() < end:
            for one in select.select(sockets, [], [], 1)[0]:
                replies.append(one.recv(100))
                sockets.remove(one)
        time.sleep(0.1)
        assert not select.select(sockets, [], [], 0)[0], "those that were let in are waited for"
        assert len(replies) == many - limits.MAX_UPLOADS
        assert all(b" 503 " in reply for reply in replies)
        assert door.ask("GET", "/config").status == 200, "the page answers meanwhile"
        row.count = many
        row.hits = len(replies)
        row.note = f"{len(replies)} told to come back"
    until_free(door)


def until_free(door: Door) -> None:
    end = time.monotonic() + 60
    while door.upload("a.yaml", b"seed: 1\n").status != 200:
        assert time.monotonic() < end, "uploads are taken no more"
        time.sleep(0.05)


def test_streams_without_number_are_refused_and_those_that_are_closed_make_room(
    page: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, most = page.guarded, 20
    monkeypatch.setattr(limits, "MAX_REQUESTS", most)
    with fault("W4", "more streams than there is room for") as row, ExitStack() as open_ones:
        lines = ["GET /gradio_api/heartbeat/{} HTTP/1.1", *(f"{k}: {v}" for k, v in door.headers().items()), "", ""]
        statuses = []
        for number in range(most + 10):
            one = open_ones.enter_context(door.raw())
            one.sendall("\r\n".join(lines).format(number).encode())
            statuses.append(one.recv(100)[9:12])
        assert statuses.count(b"503") >= 10, statuses
        assert b"200" in statuses
        row.count, row.hits = most + 10, statuses.count(b"503")
        row.note = "503 beyond the limit"
    end = time.monotonic() + 60
    while door.ask("GET", "/config").status != 200:
        assert time.monotonic() < end, "closed streams hold their places"
        time.sleep(0.05)


def test_the_folder_of_uploads_does_not_grow_without_end(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEPT_FILES", 6)
    monkeypatch.setattr(limits, "KEPT_BYTES", limits.MAX_FILE + 4000)
    with fault("W4", "uploads without end") as row:
        for number in range(20):
            reply = page.guarded.upload(f"{number}.yaml", f"# {number}\n".encode() * 300)
            assert reply.status == 200
            row.count += 1
        assert Path(json.loads(reply.text)[0]).is_file(), "the newest is there"
        files = [p for p in page.uploads.rglob("*") if p.is_file() and not p.is_symlink()]
        assert len(files) <= 6
        assert sum(p.stat().st_size for p in files) <= 4000 + 3000
        row.hits = row.count
        row.note = f"{len(files)} kept"
