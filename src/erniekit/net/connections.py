"""HTTP connections under limits: deadlines for headers, bodies and readers, a cap, and an accept() that bears EMFILE.

`limited(app, sock)` gives uvicorn's configuration and the socket it listens at. Used by serve/ and the web page.
uvicorn alone has one deadline, between two requests. Its `limit_concurrency` answers 503 to new requests once so many
connections are open, idle ones included: with it, idle connections would block new ones sooner. It is not used.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from erniekit.config.address import is_loopback
from erniekit.files.descriptors import raise_descriptors
from erniekit.log import warn
from erniekit.net.hosts import client_group

CONNECTION = "erniekit.connection"  # in a request's scope: its LimitedProtocol
MOST = 1024  # connections, where descriptors allow
LEAST = 4
RESERVE = 32  # descriptors for files, and for connections that are accepted and not yet counted
BATCH = 8  # connections accepted before other work gets its turn
SWEEP_S = 0.25
LINGER_S = 1.0  # for a refused client to read why
YIELD_S = 2.0  # a body or a reader this far behind is dropped for a new connection
CHUNKS, CHUNK_BYTES = 4096, 1024  # chunks of under 256 bytes: this many, and one more for each of these bytes
_TINY = re.compile(rb"\r\n0*[0-9a-fA-F]{1,2}(?:;[^\r\n]*)?\r\n")  # their heads
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
WHY = b'{"error":{"message":"too many connections are open","type":"server_error","param":null,"code":"connections"}}'
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(WHY), WHY)
)


@dataclass(frozen=True)
class ConnectionLimits:
    """Seconds, and numbers of connections. A deadline is absolute: single bytes do not extend it."""

    idle_s: float = 30.0  # without a byte: after connecting, and between two requests
    headers_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_s: float = 75.0  # for a body; the application may allow less
    stalled_s: float = 30.0  # in which a client reads nothing of what waits for it
    behind_s: float = 300.0  # for which a client may be behind without a break
    most: int = MOST

    @property
    def most_per_client(self) -> int:
        """Of one address. Not on loopback, where one address may be a proxy's."""
        return max(1, self.most - self.most // 4)


class Rarely:
    """A warning at its first time, and then once a minute with how often it was due."""

    def __init__(self, every_s: float = 60.0) -> None:
        self.every_s, self.count, self._next = every_s, 0, 0.0

    def warn(self, text: str) -> None:
        self.count += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.every_s
            warn(text if self.count == 1 else f"{text} ({self.count} times so far)")


class Connections:
    """All open ones of a server, oldest first. Everything happens in the event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open: dict[LimitedProtocol, None] = {}
        self.refused: dict[LimitedProtocol, None] = {}
        self.full, self.scarce = Rarely(), Rarely()
        self._sweeping = False

    def add(self, new: LimitedProtocol) -> bool:
        """False: the limit is reached. A connection that waits for its client is dropped for a new one."""
        local = is_loopback(new.group)
        own = [] if local else [one for one in self.open if one.group == new.group]
        if len(own) >= self.limits.most_per_client and not self.evict(own):
            return False
        if len(self.open) >= self.limits.most and not self.evict(list(self.open)):
            self.full.warn(f"all {self.limits.most} connections are in use: new ones get 503")
            return False
        self.open[new] = None
        return True

    def evict(self, among: list[LimitedProtocol], count: int = 1) -> int:
        """Closes up to `count`: of the client with the most of them first, those without a request, then the oldest."""
        now, held = time.monotonic(), Counter(one.group for one in self.open)
        ranked = [(one.rank(now), one) for one in among]
        waiting = [(-held[one.group], rank, one.since, one) for rank, one in ranked if rank is not None]
        waiting.sort(key=lambda found: found[:3])
        for *_, one in waiting[:count]:
            self.drop(one)
        return len(waiting[:count])

    def drop(self, one: LimitedProtocol) -> None:
        self.open.pop(one, None)
        self.refused.pop(one, None)
        one.transport.abort()

    def refuse(self, one: LimitedProtocol) -> None:
        """A connection that is closed at once takes its answer with it: the client gets a moment to read."""
        one.transport.write(BUSY)
        if len(self.refused) >= BATCH:
            one.transport.close()
        else:
            self.refused[one] = None

    def sweep_soon(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        now = time.monotonic()
        for one in [*self.open, *self.refused]:
            one.check(now)
        if self.open or self.refused:
            self.sweep_soon()


class LimitedProtocol(H11Protocol):
    """One connection. h11: it is there wherever uvicorn is, and its parser reads no more than 16 KB of headers."""

    shared: Connections  # of the server; see `limited`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.group = client_group(self.client[0]) if self.client else ""
        now = time.monotonic()
        self.since = now  # it connected, its request began, or its last response was complete
        self.first: float | None = None  # when the first byte of an incomplete head came
        self.wire = self.tiny = 0  # bytes and small chunks of a body so far
        self.unsent, self.read_at, self.level_at, self.closing_at = 0, now, now, 0.0
        self.taken = self.shared.add(self)
        if not self.taken:
            self.shared.refuse(self)
        self.shared.sweep_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.open.pop(self, None)
        self.shared.refused.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.taken:
            return
        if self._in_tiny_chunks(data):
            self.shared.drop(self)
            return
        if not self.active and self.first is None:
            self.first = time.monotonic()
        super().data_received(data)
        if self.active and self.first is not None:
            self.first, self.since = None, time.monotonic()
            self.scope[CONNECTION] = self  # type: ignore[literal-required]

    async def write_chunk(self, body: bytes) -> bool:
        """A piece of the body of a response whose head was sent, past the layers between, which cost more than it.
        False: not for this client, and nothing was written."""
        if self.conn.their_http_version != b"1.1":  # older ones have no chunks
            return False
        if self.flow.write_paused and not self.cycle.disconnected:
            await self.flow.drain()
        if not self.cycle.disconnected and body:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _in_tiny_chunks(self, data: bytes) -> bool:
        """A chunked body in more pieces than its size explains: each costs the parser as much as a whole request."""
        if not (self.active and self.cycle.more_body):
            self.wire = self.tiny = 0
            return False
        self.wire, self.tiny = self.wire + len(data), self.tiny + len(_TINY.findall(data))
        if self.tiny <= CHUNKS + self.wire // CHUNK_BYTES:
            return False
        return any(name == b"transfer-encoding" for name, _ in self.scope["headers"])

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.first, self.since = None, time.monotonic()

    def resume_writing(self) -> None:
        self.read_at = time.monotonic()  # between two checks the buffer may have been emptied and filled again
        super().resume_writing()

    @property
    def active(self) -> bool:
        """A request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def rank(self, now: float) -> int | None:
        """How soon it is dropped for a new connection; None: it is not, since it waits for us."""
        if not self.active:
            return 0
        if self.cycle.more_body and now - self.since > YIELD_S:
            return 1
        return 2 if self.unsent and now - self.read_at > YIELD_S else None

    def check(self, now: float) -> None:
        """Called several times a second: closes what is over a deadline."""
        limits, size = self.shared.limits, self.transport.get_write_buffer_size()
        if not size:
            self.level_at = now
        if not size or size < self.unsent:
            self.read_at = now
        self.unsent = size
        if now - self.read_at > limits.stalled_s or now - self.level_at > limits.behind_s:
            self.shared.drop(self)
        elif not self.taken:
            if now - self.since > LINGER_S:
                self.shared.drop(self)
        elif self.transport.is_closing():
            # close() waits until everything is sent, for ever if the client does not read.
            self.closing_at = self.closing_at or now
            if now - self.closing_at > limits.headers_s:
                self.shared.drop(self)
        elif self.active:
            if self.cycle.more_body and now - self.since > limits.body_s:
                self.shared.drop(self)
        elif now > (self.since + limits.idle_s if self.first is None else self.first + limits.headers_s):
            self.transport.close()


class Listener(socket.socket):
    """A listening socket for asyncio's accept loop. Takes over the descriptor of `sock`.

    On EMFILE that loop logs a trace for each place of its backlog, then tries again every second.
    """

    def __init__(self, sock: socket.socket, shared: Connections) -> None:
        super().__init__(fileno=sock.detach())
        self.shared, self._taken, self._quiet = shared, 0, False

    def accept(self) -> tuple[socket.socket, Any]:
        """BlockingIOError ends asyncio's loop for now; it comes back as soon as other callbacks have run."""
        if self._taken >= BATCH:
            raise BlockingIOError
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._rest)
        try:
            found = super().accept()
        except OSError as error:
            self._taken = BATCH
            if error.errno not in SCARCE:
                raise
            self.shared.scarce.warn(f"no descriptor for a new connection ({error.strerror}): idle ones are closed")
            if self.shared.evict(list(self.shared.open), BATCH):
                raise BlockingIOError from None
            self._hush()
            raise  # asyncio pauses for a second
        self._taken += 1
        return found

    def _rest(self) -> None:
        self._taken = 0

    def _hush(self) -> None:
        """asyncio reports the error of accept() to the loop's exception handler, which prints a trace."""
        if self._quiet:
            return
        self._quiet = True
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, OSError) and error.errno in SCARCE and "accept" in context.get("message", ""):
                return
            if before is not None:
                before(loop, context)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(handle)


def most_connections() -> int:
    """By the descriptors that are left to this process."""
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 3
    return max(LEAST, min(MOST, raise_descriptors() - used - RESERVE))


def limited(
    app: Any, sock: socket.socket, limits: ConnectionLimits | None = None, **options: Any
) -> tuple[uvicorn.Config, socket.socket]:
    """For `uvicorn.Server(config).run(sockets=[listening])`. `sock` is bound; its descriptor moves to the new one."""
    limits = limits or ConnectionLimits(most=most_connections())
    connections = Connections(limits)

    class Protocol(LimitedProtocol):
        shared = connections

    plain: dict[str, Any] = {
        "http": Protocol,
        "ws": "none",  # a WebSocket would leave these limits
        "loop": "asyncio",  # uvloop accepts by itself
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": max(1, round(limits.idle_s)),
    }
    return uvicorn.Config(app, **{**plain, **options}), Listener(sock, connections)
