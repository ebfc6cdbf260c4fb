"""W2: the real page on a real port, asked by names, pages and people it does not belong to."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.results import fault

pytest.importorskip("gradio", reason="the page needs gradio: pip install -e '.[webui]'")
pytest.importorskip("uvicorn")

START_S = 90


@dataclass
class Page:
    port: int
    token: str
    room: Path
    kind: str

    def ask(
        self, path: str = "/", method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers; a header without text is not sent."""
        given = {"Host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): text for name, text in headers.items()}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, text in given.items():
                if text:
                    connection.putheader(name, text)
            if body:
                connection.putheader("Content-Type", "application/json")
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body.encode() if body else None)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace"), dict(answer.getheaders())
        finally:
            connection.close()


def start(room: Path, host: str, *more: str) -> tuple[subprocess.Popen[str], Page]:
    words = [sys.executable, "-m", "erniekit", "webui", f"host={host}", "port=0", f"root={room}", *more]
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=room, start_new_session=True,
        env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    said, end = "", time.monotonic() + START_S
    assert child.stdout is not None
    while time.monotonic() < end and (line := child.stdout.readline()):
        said += line
        if found := re.search(r"ready: http://\S+?:(\d+)/(?:\?token=(\S+))?", line):
            kind = "a loopback address" if host == "127.0.0.1" else "an open address"
            return child, Page(int(found[1]), found[2] or "", room, kind)
    child.kill()
    raise AssertionError(f"the page did not start: {said}")


ADDRESSES = [pytest.param("0.0.0.0", id="open"), pytest.param("127.0.0.1", id="loopback", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=ADDRESSES)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    room = tmp_path_factory.mktemp("page")
    (room / "secret.txt").write_text("the secret of the room")
    child, page = start(room, request.param)
    yield page
    end(child)


def end(child: subprocess.Popen[str]) -> None:
    os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def cookie(page: Page) -> str:
    """Of somebody who opened the printed address."""
    status, _, headers = page.ask(f"/?token={page.token}")
    assert status == 303
    return headers["set-cookie"].partition(";")[0]


def foreign(page: Page) -> list[tuple[str, str, dict[str, str]]]:
    """(method, path, headers) of requests that come from elsewhere, each by somebody who has the cookie."""
    own, has = f"127.0.0.1:{page.port}", {"Cookie": cookie(page)}
    secret, uploads = page.room / "secret.txt", "/tmp"
    call = "/gradio_api/queue/join"
    return [
        ("GET", "/", {**has, "Host": "evil.example"}),
        ("GET", "/", {**has, "Host": f"127.0.0.1.evil.example:{page.port}"}),
        ("GET", "/config", {**has, "Host": f"evil.example:{page.port}"}),
        ("POST", call, {**has, "Origin": "http://evil.example"}),
        ("POST", call, {**has, "Origin": "null"}),
        ("POST", call, {**has, "Origin": f"http://{own.replace(str(page.port), '1')}"}),
        ("GET", "/config", {**has, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
        ("GET", "/gradio_api/file=/etc/passwd", has),
        ("GET", f"/gradio_api/file={secret}", has),
        ("GET", f"/file={secret}", has),
        ("GET", f"/gradio_api/file={uploads}/../etc/passwd", has),
        ("GET", "/gradio_api/file=%2Fetc%2Fpasswd", has),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", has),
        ("GET", "/assets/..%2f..%2f..%2fetc/passwd", has),
        ("GET", "/static/%252e%252e/%252e%252e/etc/passwd", has),
    ]


def strangers(page: Page) -> list[tuple[str, str, dict[str, str]]]:
    """Requests without the token, or with one that is nearly right."""
    return [
        ("GET", "/", {}),
        ("GET", "/config", {}),
        ("GET", "/?token=", {}),
        ("GET", "/?token=wrong", {}),
        ("GET", f"/?token={page.token[:-1]}", {}),
        ("GET", f"/?token={page.token}x", {}),
        ("GET", "/", {"Cookie": f"erniekit-{page.port}={page.token}"}),
        ("GET", "/", {"Cookie": f"erniekit-{page.port}="}),
        ("POST", "/gradio_api/queue/join", {}),
        ("POST", "/gradio_api/upload", {}),
        ("GET", "/gradio_api/file=/etc/passwd", {}),
        ("GET", "/gradio_api/info", {"Authorization": f"Bearer {page.token}"}),
    ]


def test_requests_from_elsewhere_get_403_and_nothing_else(page: Page) -> None:
    with fault("W2", f"foreign Host and Origin, and paths of files, at {page.kind}") as entry:
        for method, path, headers in foreign(page):
            status, text, got = page.ask(path, method, "{}" if method == "POST" else "", **headers)
            assert status == 403, f"{method} {path} {headers}: {status}"
            assert len(text) < 200
            assert "root:" not in text
            assert "secret" not in text
            assert got["x-content-type-options"] == "nosniff"
            entry.count += 1
        entry.hits = entry.count
        entry.note = "403 each time"


def test_without_the_token_the_page_is_closed(page: Page) -> None:
    with fault("W2", f"no token, or a wrong one, at {page.kind}") as entry:
        for method, path, headers in strangers(page):
            status, text, _ = page.ask(path, method, "{}" if method == "POST" else "", **headers)
            assert status == 403, f"{method} {path} {headers}: {status}"
            assert page.token not in text
            entry.count += 1
        entry.hits = entry.count
        entry.note = "403 each time"


def test_the_page_is_there_for_its_own_user(page: Page) -> None:
    has = {"Cookie": cookie(page)}
    status, text, headers = page.ask("/", **has)
    assert status == 200
    assert "erniekit" in text.lower()
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert page.ask("/config", **has, Origin=f"http://127.0.0.1:{page.port}")[0] == 200


@pytest.mark.full
def test_the_token_can_be_left_out_on_this_machine(tmp_path: Path) -> None:
    child, page = start(tmp_path, "127.0.0.1", "--no-token")
    try:
        assert page.token == ""
        assert page.ask()[0] == 200
        assert page.ask(Host="evil.example")[0] == 403
    finally:
        end(child)
