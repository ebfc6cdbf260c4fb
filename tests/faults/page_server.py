"""The real page in this process on two ports: behind its guard, and gradio alone, so that each layer can be driven."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

JOIN = "/gradio_api/queue/join"
UPLOAD = "/gradio_api/upload"
TOKEN = "the-token-of-this-test"


@dataclass
class Reply:
    status: int
    text: str
    headers: dict[str, str]


@dataclass
class Door:
    """One of the two ports."""

    port: int
    cookie: str = ""

    def headers(self, **more: str) -> dict[str, str]:
        has = {"Cookie": self.cookie} if self.cookie else {}
        return {"Host": f"127.0.0.1:{self.port}", **has, **more}

    def ask(self, method: str, path: str, body: bytes | None = None, timeout: float = 30, **headers: str) -> Reply:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, self.headers(**headers))
            answer = connection.getresponse()
            return Reply(answer.status, answer.read().decode("utf-8", "replace"), dict(answer.getheaders()))
        finally:
            connection.close()

    def call(self, fn: int, data: list[Any], timeout: float = 60) -> Reply:
        """An event of the page, as the browser sends it; the reply holds all that came back."""
        who = secrets.token_hex(6)
        body = json.dumps({"fn_index": fn, "data": data, "session_hash": who, "event_data": None, "trigger_id": None})
        joined = self.ask("POST", JOIN, body.encode(), **{"Content-Type": "application/json"})
        if joined.status != 200:
            return joined
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        text = joined.text
        try:
            connection.request("GET", f"/gradio_api/queue/data?session_hash={who}", headers=self.headers())
            answer = connection.getresponse()
            while line := answer.readline():
                text += line.decode("utf-8", "replace")
                if b'"process_completed"' in line or b'"close_stream"' in line or b'"unexpected_error"' in line:
                    break
        finally:
            connection.close()
        return Reply(200, text, {})

    def upload(self, name: str, content: bytes) -> Reply:
        edge = secrets.token_hex(8)
        head = f'--{edge}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = head.encode() + content + f"\r\n--{edge}--\r\n".encode()
        return self.ask("POST", UPLOAD, body, **{"Content-Type": f"multipart/form-data; boundary={edge}"})

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@dataclass
class Served:
    guarded: Door
    bare: Door
    page: Any  # gradio's Blocks
    uploads: Path
    room: Path


@contextmanager
def served(room: Path) -> Iterator[Served]:
    import uvicorn

    from erniekit.webui.app import PageSettings, make_app

    kept = {name: os.environ.get(name) for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR")}
    sockets = []
    for _ in range(2):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        sockets.append(listening)
    ports = [one.getsockname()[1] for one in sockets]
    guard = make_app(PageSettings(port=ports[0], roots=(str(room),), lang="en"), TOKEN)
    inside = guard.app.app
    page = next(r.app.get_blocks() for r in inside.routes if hasattr(getattr(r, "app", None), "get_blocks"))
    quiet: dict[str, Any] = {"log_level": "critical", "access_log": False, "timeout_graceful_shutdown": 1}
    servers = [
        uvicorn.Server(uvicorn.Config(guard, **quiet)),
        uvicorn.Server(uvicorn.Config(inside, lifespan="off", **quiet)),
    ]

    async def serve() -> None:
        await asyncio.gather(*(server.serve([one]) for server, one in zip(servers, sockets)))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not all(server.started for server in servers):
        assert time.monotonic() < end, "the page did not start"
        time.sleep(0.02)
    guarded = Door(ports[0])
    guarded.cookie = guarded.ask("GET", f"/?token={TOKEN}").headers["set-cookie"].partition(";")[0]
    try:
        yield Served(guarded, Door(ports[1]), page, guard.files[0], room)
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(20)
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
