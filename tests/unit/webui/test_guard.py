"""Who may speak to the page: its own address, its own pages, and whoever has the token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from erniekit.config.address import is_loopback
from erniekit.webui.guard import HEADERS, Guard, new_token

HERE = {"host": "127.0.0.1:7860"}


async def page(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-frame-options", b"SAMEORIGIN")]})
    await send({"type": "http.response.body", "body": b"page"})


def ask(
    guard: Guard, headers: dict[str, str] | None = None, path: str = "/", query: str = "", method: str = "GET",
    kind: str = "http",
) -> tuple[int, dict[str, str]]:  # fmt: skip
    """Status (101 for a websocket let in, 403 for one that is not) and headers."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(k.encode(), v.encode("latin-1")) for k, v in (HERE if headers is None else headers).items()]
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": given}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    asyncio.run(guard(scope, receive, send))
    if kind == "websocket":
        return (101 if sent[0]["type"] == "websocket.accept" else 403), {}
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "LOCALHOST", "[::1]:7860"])
def test_the_names_of_this_machine_are_let_in(host: str) -> None:
    assert ask(Guard(page), {"host": host})[0] == 200


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:7860", "localhost.evil:7860", ""])
def test_a_foreign_name_that_points_here_is_refused(host: str, kind: str) -> None:
    assert ask(Guard(page), {"host": host}, kind=kind)[0] == 403
    assert ask(Guard(page), {}, kind=kind)[0] == 403


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:7861",
        "http://127.0.0.1",
        "file://",
        "x",
        "http://localhost:7860",
    ],
)
def test_a_page_of_another_address_cannot_ask(origin: str, kind: str) -> None:
    assert ask(Guard(page), {**HERE, "origin": origin}, method="POST", kind=kind)[0] == 403


def test_the_page_itself_can_ask() -> None:
    for kind, right in (("http", 200), ("websocket", 101)):
        own = {**HERE, "origin": "http://127.0.0.1:7860"}
        assert ask(Guard(page), own, "/gradio_api/queue/join", method="POST", kind=kind)[0] == right


def test_what_another_site_embeds_is_refused_and_a_link_from_it_is_followed() -> None:
    cross = {**HERE, "sec-fetch-site": "cross-site"}
    assert ask(Guard(page), {**cross, "sec-fetch-mode": "no-cors"})[0] == 403
    assert ask(Guard(page), {**cross, "sec-fetch-mode": "navigate"})[0] == 200


def test_an_open_address_needs_a_token_to_be_made() -> None:
    with pytest.raises(ValueError, match="token"):
        Guard(page, "0.0.0.0")


@pytest.fixture
def open_guard() -> Guard:
    return Guard(page, "0.0.0.0", 7860, token="right-token")


@pytest.mark.parametrize(
    "query", ["", "token=", "token=wrong", "token=right-toke", "token=right-token2", "x=right-token", "token=%ff"]
)
def test_without_the_right_token_nobody_comes_in(open_guard: Guard, query: str) -> None:
    for kind in ("http", "websocket"):
        assert ask(open_guard, {"host": "10.0.0.5:7860"}, query=query, kind=kind)[0] == 403


def test_the_token_moves_from_the_url_into_a_cookie(open_guard: Guard) -> None:
    there = {"host": "10.0.0.5:7860"}
    status, headers = ask(open_guard, there, path="/a", query="lang=zh&token=right-token")
    assert (status, headers["location"]) == (303, "/a?lang=zh")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert "right-token" not in cookie
    name = cookie.partition(";")[0]
    assert ask(open_guard, {**there, "cookie": f"other=1; {name}"})[0] == 200
    assert ask(open_guard, {**there, "cookie": name}, kind="websocket")[0] == 101
    for wrong in (name + "0", name.replace("7860", "7861"), name.partition("=")[0] + "=", "\x01=;;=" + name[-9:]):
        assert ask(open_guard, {**there, "cookie": wrong})[0] == 403


def test_a_redirect_never_leaves_the_page(open_guard: Guard) -> None:
    _, headers = ask(open_guard, {"host": "10.0.0.5"}, path="//evil.example/x", query="token=right-token")
    assert headers["location"] == "/evil.example/x"


def test_an_open_page_takes_numbers_and_its_own_names_but_no_name_that_could_be_rebound() -> None:
    guard = Guard(page, "0.0.0.0", 1, token="t", names=["box.lan"])
    for host, status in (("192.168.1.9:7860", 303), ("box.lan", 303), ("evil.example", 403)):
        assert ask(guard, {"host": host}, query="token=t")[0] == status, host


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/a/%2e%2e/%2e%2e/etc/passwd", "/%252e%252e/x", "/a\x00", "/..\\x",
     "/gradio_api/file=/etc/passwd", "/file=/etc/passwd",
     "/gradio_api/file=etc/passwd", "/gradio_api/file=C:/x", "/gradio_api/file="],
)  # fmt: skip
def test_paths_that_climb_or_name_files_elsewhere_are_refused(path: str, tmp_path: Path) -> None:
    assert ask(Guard(page, files=[tmp_path]), path=path)[0] == 403


def test_files_of_a_served_folder_are_given_and_links_out_of_it_are_not(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "out").symlink_to("/etc/passwd")
    guard = Guard(page, files=[tmp_path / "served"])
    assert ask(guard, path=f"/gradio_api/file={tmp_path}/served/a.yaml")[0] == 200
    assert ask(guard, path=f"/gradio_api/file={tmp_path}/served/out")[0] == 403
    assert ask(guard, path=f"/gradio_api/file={tmp_path}/other")[0] == 403


def test_every_answer_carries_the_headers_and_keeps_those_it_has() -> None:
    _, headers = ask(Guard(page))
    assert {name.decode() for name, _ in HEADERS} <= set(headers)
    assert headers["x-frame-options"] == "SAMEORIGIN"
    _, refused = ask(Guard(page), {"host": "evil.example"})
    assert refused["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "other", ['prefs={"theme":"dark","n":1}', "name=\xe5\xbc\xa0", "x[y]=1", "flag", "a=b c", "=", "a"]
)
def test_cookies_of_other_programs_of_this_host_lock_nobody_out(open_guard: Guard, other: str) -> None:
    there = {"host": "10.0.0.1"}
    name = ask(open_guard, there, query="token=right-token")[1]["set-cookie"].partition(";")[0]
    for cookies in (f"{other}; {name}", f"{name}; {other}", f"{other};{name};{other}"):
        assert ask(open_guard, {**there, "cookie": cookies})[0] == 200
    assert ask(open_guard, {**there, "cookie": other})[0] == 403


@pytest.mark.parametrize("path", ["/\t/evil.example", "//evil.example", "/\r\nX: y", "/\\evil.example", "/a b/%"])
def test_the_way_back_from_the_token_stays_on_this_page(open_guard: Guard, path: str) -> None:
    status, headers = ask(open_guard, {"host": "10.0.0.1"}, path=path, query="token=right-token")
    if status == 303:
        target = headers["location"]
        assert target.startswith("/")
        assert not target.startswith(("//", "/\\"))
        assert target.isprintable()
        assert " " not in target
    else:
        assert status == 403


def test_two_pages_on_one_machine_have_cookies_of_their_own() -> None:
    one, other = (Guard(page, "0.0.0.0", port, token="t") for port in (1, 2))
    assert one.cookie != other.cookie


def test_loopback_addresses_and_long_tokens() -> None:
    assert is_loopback("127.3.2.1")
    assert is_loopback("[::1]")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("localhost.evil")
    assert len(new_token()) >= 32
    assert new_token() != new_token()
