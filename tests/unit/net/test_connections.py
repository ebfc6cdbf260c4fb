"""Deadlines, the cap and accept(): a small application behind real sockets."""

from __future__ import annotations

import errno
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn

from erniekit.net import connections
from erniekit.net.connections import ConnectionLimits, Connections, LimitedProtocol, Listener, Rarely, limited
from support.clock import PATIENCE_S, Clock, comes_true, within

SHORT = ConnectionLimits(idle_s=0.6, headers_s=0.4, body_s=0.5, stalled_s=0.6, behind_s=5.0, most=6)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
SOON_S = 20.0  # for what SHORT closes, on a machine that stands still too; other limits leave it open for longer
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"


class App:
    """Answers at once; /slow when it is let go; /large with more than any socket's buffers hold."""

    def __init__(self) -> None:
        self.go, self.cut = threading.Event(), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        message = await receive()
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            self.cut += 1
            return
        while scope["path"] == "/slow" and not self.go.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(400 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": b"x" * 2**17, "more_body": True})
        await send({"type": "http.response.body", "body": b"done"})


@contextmanager
def serving(limits: ConnectionLimits) -> Iterator[tuple[App, int, Connections]]:
    app = App()
    sock = socket.create_server(("127.0.0.1", 0))
    config, listening = limited(app, sock, limits, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    assert isinstance(listening, Listener)
    try:
        yield app, listening.getsockname()[1], listening.shared
    finally:
        app.go.set()
        server.should_exit = server.force_exit = True
        thread.join(60)
        assert not thread.is_alive()


def connect(port: int, send: bytes = b"") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    link.sendall(send)
    return link


def ask(port: int, text: bytes = GET) -> bytes:
    """The status line."""
    with connect(port, text) as link:
        return link.recv(65536).split(b"\r\n")[0]


def closed_after(link: socket.socket, began: float | None = None) -> float:
    """Seconds until the server has closed it, from now or from when it was connected at the earliest."""
    began = time.monotonic() if began is None else began
    try:
        while link.recv(65536):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - began


def test_a_connection_without_a_request_is_closed_in_the_idle_time():
    with serving(SHORT) as (_, port, _):
        began = time.monotonic()
        with connect(port) as silent, connect(port, GET) as served:
            assert SHORT.idle_s <= closed_after(silent, began) < SOON_S
            assert served.recv(65536)
            assert closed_after(served) < SOON_S


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ", b"POST / HTTP/1.1\r\nCont"])
def test_a_byte_now_and_then_does_not_extend_the_time_for_headers(head: bytes):
    with serving(SHORT) as (_, port, shared):
        began = time.monotonic()
        with connect(port, head) as slow:
            try:
                while time.monotonic() - began < SOON_S:
                    slow.sendall(b"a")
                    time.sleep(0.1)
            except OSError:
                pass
            assert SHORT.headers_s <= time.monotonic() - began < SOON_S
            assert comes_true(lambda: not shared.open)


def test_a_body_that_does_not_come_ends_the_connection_also_after_an_early_answer():
    with serving(SHORT) as (app, port, _), connect(port, POST) as link:
        assert closed_after(link) < SOON_S
        assert comes_true(lambda: app.cut == 1), "the application is told"


def test_a_body_in_tiny_chunks_is_cut_off_and_one_in_useful_ones_is_not():
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    tiny, useful = b"1\r\n \r\n" * 200_000, b"400\r\n" + b"x\r\n" * 341 + b"x\r\n"[:1]
    with serving(ConnectionLimits()) as (app, port, _):
        began = time.process_time()
        with connect(port) as link:
            try:
                link.sendall(head + tiny + b"0\r\n\r\n")
            except OSError:
                pass
            assert closed_after(link) < SOON_S
        assert within(time.process_time() - began, 3)  # 200,000 chunks take the parser longer
        assert comes_true(lambda: app.cut == 1)
        with connect(port, head + (useful + b"\r\n") * 500 + b"0\r\n\r\n") as link:
            assert link.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off_and_one_that_reads_slowly_is_not():
    with serving(ConnectionLimits(stalled_s=3.0)) as (_, port, shared):
        stalled = connect(port, GET.replace(b"/ ", b"/large ", 1))
        slow = connect(port, GET.replace(b"/ ", b"/large ", 1))
        size, end = len(slow.recv(1)), time.monotonic() + SOON_S
        assert len(shared.open) == 2
        while len(shared.open) == 2 and time.monotonic() < end:  # until the one that reads nothing is cut off
            size += len(slow.recv(2**16))
            time.sleep(0.02)
        assert len(shared.open) == 1
        assert size < 400 * 2**17, "it was slow, and there is more of it"
        while size < 400 * 2**17:
            part = slow.recv(2**20)
            assert part, "cut off"
            size += len(part)
        slow.close()
        stalled.close()


def test_a_new_connection_takes_the_place_of_the_oldest_without_a_request():
    with serving(ConnectionLimits(most=6)) as (app, port, shared), ExitStack() as stack:
        idle = [stack.enter_context(connect(port)) for _ in range(5)]
        busy = stack.enter_context(connect(port, GET.replace(b"/ ", b"/slow ", 1)))
        assert comes_true(lambda: sum(one.active for one in shared.open) == 1 and len(shared.open) == 6)
        assert ask(port).endswith(b"200 OK")
        assert closed_after(idle[0]) < SOON_S, "idle connections have 30 s"
        assert len(shared.open) <= 6
        app.go.set()
        assert busy.recv(65536).startswith(b"HTTP/1.1 200"), "who is being answered stays"


def test_where_all_wait_for_us_a_new_connection_gets_503_and_later_ones_get_in(capfd: pytest.CaptureFixture[str]):
    with serving(ConnectionLimits(most=4)) as (app, port, shared), ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(connect(port, GET.replace(b"/ ", b"/slow ", 1)))
        assert comes_true(lambda: sum(one.active for one in shared.open) == 4)
        for _ in range(20):
            assert ask(port).endswith(b"503 Service Unavailable")
        app.go.set()
        assert comes_true(lambda: ask(port).endswith(b"200 OK"))
        assert shared.full.count >= 20
    assert capfd.readouterr().err.count("warning") == 1


def test_a_body_that_is_long_in_coming_makes_way_before_an_answer_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "YIELD_S", 0.1)
    with serving(ConnectionLimits(most=3)) as (_, port, shared), ExitStack() as stack:
        slow = stack.enter_context(connect(port, POST))
        for _ in range(2):
            stack.enter_context(connect(port, GET.replace(b"/ ", b"/slow ", 1)))
        assert comes_true(lambda: sum(one.active for one in shared.open) == 3), "one without a request would go first"
        assert comes_true(lambda: ask(port).endswith(b"200 OK"))
        assert closed_after(slow) < SOON_S


class Link:
    """As much of a connection as the registry asks for."""

    def __init__(self, group: str, since: float = 0.0, rank: int | None = 0) -> None:
        self.group, self.since, self._rank, self.transport, self.aborted = group, since, rank, self, False

    def rank(self, now: float) -> int | None:
        return self._rank

    def abort(self) -> None:
        self.aborted = True


def test_one_address_cannot_have_all_connections_and_loses_its_own_first():
    shared = Connections(ConnectionLimits(most=8))
    greedy = [Link("192.0.2.1", k, None if k < 3 else 0) for k in range(6)]
    other = Link("192.0.2.2", 9)
    assert all(shared.add(link) for link in [other, *greedy])  # type: ignore[arg-type]
    assert shared.add(Link("192.0.2.1", 10))  # type: ignore[arg-type]
    assert [link.aborted for link in greedy] == [False, False, False, True, False, False]
    for link in list(shared.open):
        link._rank = None  # type: ignore[attr-defined]
    assert not shared.add(Link("192.0.2.1")), "six are three quarters of eight"  # type: ignore[arg-type]
    assert shared.add(Link("192.0.2.3"))  # type: ignore[arg-type]
    other._rank = 0
    assert not other.aborted


def test_accept_without_descriptors_closes_idle_connections_and_says_so_once(capfd: pytest.CaptureFixture[str]):
    with serving(ConnectionLimits(most=1000)) as (_, port, shared), ExitStack() as stack:
        links = [stack.enter_context(connect(port)) for _ in range(20)]
        while len(shared.open) < 20:
            time.sleep(0.01)
        # The lowest free descriptor is the limit: accept() fails, and so does everything else that opens one here.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        late = socket.socket()
        lowest = late.fileno() + 1
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
            late.settimeout(PATIENCE_S)
            late.connect(("127.0.0.1", port))
            late.sendall(GET)
            assert late.recv(65536).startswith(b"HTTP/1.1 200")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            late.close()
        assert shared.scarce.count >= 1
        assert len(shared.open) < 20
        assert len(links) == 20
    said = capfd.readouterr().err
    assert said.count("no descriptor") == 1
    assert "Traceback" not in said


def test_a_warning_is_given_once_and_then_with_its_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    monkeypatch.setattr(connections, "time", clock)
    rarely = Rarely(60.0)
    for _ in range(50):
        rarely.warn("again")
    clock.sleep(60.0)
    rarely.warn("again")
    assert capsys.readouterr().err.splitlines() == ["warning: again", "warning: again (51 times so far)"]


def test_the_number_of_connections_follows_from_the_descriptors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "raise_descriptors", lambda: 128)
    assert 4 <= connections.most_connections() <= 96
    monkeypatch.setattr(connections, "raise_descriptors", lambda: 4096)
    assert connections.most_connections() == 1024


def test_an_error_of_accept_that_is_not_about_descriptors_is_left_to_asyncio(monkeypatch: pytest.MonkeyPatch):
    import asyncio

    async def go() -> None:
        sock = socket.socket()  # not listening: EINVAL
        listener = Listener(sock, Connections(ConnectionLimits()))
        with listener, pytest.raises(OSError) as error:
            listener.accept()
        assert error.value.errno == errno.EINVAL

    asyncio.run(go())


def test_no_web_socket_leaves_the_limits():
    sock = socket.create_server(("127.0.0.1", 0))
    config, listening = limited(App(), sock)
    listening.close()
    config.load()
    assert config.ws_protocol_class is None
    assert issubclass(config.http_protocol_class, LimitedProtocol)  # type: ignore[arg-type]
