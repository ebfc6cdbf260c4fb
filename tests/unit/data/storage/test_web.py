"""Servers that tell no size, a wrong one, or send another file after a lost connection: a part is not the whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from erniekit.data.storage import web
from erniekit.data.stream_source import file_versions
from erniekit.data.tokenise import whole_rows
from erniekit.errors import DataError

CONTENT = b"".join(b'{"number": %d, "text": "%s"}\n' % (n, b"-" * 1000) for n in range(1500))


class Odd(BaseHTTPRequestHandler):
    """head: the length that HEAD tells. most: bytes of each answer. after: the content of continued answers."""

    head, most, after, tag = "", len(CONTENT), CONTENT, ""

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        if self.head:
            self.send_header("Content-Length", self.head)
        if self.tag:
            self.send_header("ETag", self.tag)
        self.end_headers()

    def do_GET(self) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        content = self.after if start else CONTENT
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + self.most])


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Odd]]]:
    monkeypatch.setattr(web, "_TRIES", 2)
    handler = type("OneOdd", (Odd,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", handler
        server.shutdown()


@pytest.mark.parametrize("head", ["", "1000", str(len(CONTENT) + 1000)])
@pytest.mark.parametrize("most", [len(CONTENT), 600_000])
def test_a_file_is_as_long_as_the_answer_that_brings_it(head: str, most: int, odd) -> None:
    url, handler = odd
    handler.head, handler.most = head, most
    assert b"".join(raw + b"\n" for _, raw in whole_rows(url)) == CONTENT


def test_a_file_that_was_replaced_by_a_longer_one_is_not_continued(odd) -> None:
    url, handler = odd
    handler.most, handler.after = 600_000, CONTENT.upper() + b"{}\n"
    with pytest.raises(DataError, match="replaced meanwhile"):
        list(whole_rows(url))


def test_a_server_that_sends_no_byte_of_the_file_is_refused(odd) -> None:
    url, handler = odd
    handler.most, handler.after = 0, CONTENT
    with pytest.raises(DataError, match="ended after 0 of"):
        list(whole_rows(url))


def test_a_server_without_versions_is_told_of_before_a_file_is_streamed(odd, capsys) -> None:
    url, handler = odd
    handler.tag = '"1"'
    file_versions([url])
    assert "no version" not in capsys.readouterr().err
    handler.tag = ""
    file_versions([f"{url}?token=secret"])
    told = capsys.readouterr().err
    assert "names no version" in told
    assert "secret" not in told
