"""Limits: how much a request may bring, how long that may take, how many come at once, and which files it may name.

Called by guard.py for every request that it lets in. Bodies are read here whole, within their limit, before gradio sees
any of them; so a body without an end, or one of 200 MB, costs no more than the limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_FILE = 64 * 2**20  # bytes of an upload: data files, recipes, and pictures and videos for the Chat tab
MAX_UPLOAD = MAX_FILE + 2**16  # with the form around it
MAX_BODY = 2 * 2**20  # bytes of any other request: all fields of a form, or a conversation
BODY_S = 30.0  # until a body must be here
UPLOAD_S = 120.0  # until an upload must be
MAX_REQUESTS = 200  # at once, streams included: an open page has two
MAX_BODIES = 32  # at once: they are in memory
MAX_UPLOADS = 4  # at once
KEPT_BYTES, KEPT_FILES = 256 * 2**20, 200  # of uploads as they come in; the oldest go first
UPLOAD = "/gradio_api/upload"
POSTS = (UPLOAD, "/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset")  # all that the page sends
CLOSED = (
    "/gradio_api/deep_link",
    "/gradio_api/proxy=",
    "/gradio_api/vibe-code",
)  # parts of gradio that the page has no use for


class Refused(Exception):
    """A response with an error status instead of the requested one."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class RequestLimits:
    """`uploads`: the folders that uploads go to, and the only ones whose files a request may name."""

    def __init__(self, app: Any, uploads: Sequence[Path] = ()) -> None:
        self.app, self.uploads = app, uploads
        self.open_requests = self.open_bodies = self.open_uploads = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refused before anything is answered."""
        if self.open_requests >= MAX_REQUESTS:
            raise Refused(503, f"{MAX_REQUESTS} requests are open: close other tabs of this page, then try again")
        self.open_requests += 1
        try:
            if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
                await self._with_body(scope, receive, send)
            else:
                _refuse_closed(scope)
                await self.app(scope, receive, send)
        finally:
            self.open_requests -= 1

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/")
        if path not in POSTS or scope["method"] != "POST":
            raise Refused(403, "there is nothing here")
        is_upload = path == UPLOAD
        if self.open_bodies >= MAX_BODIES or (is_upload and self.open_uploads >= MAX_UPLOADS):
            raise Refused(503, "too many requests at once: try again in a moment")
        self.open_bodies, self.open_uploads = self.open_bodies + 1, self.open_uploads + is_upload
        try:
            limit, seconds = (MAX_UPLOAD, UPLOAD_S) if is_upload else (MAX_BODY, BODY_S)
            body = await read_body(scope, receive, limit, seconds)
            if is_upload:
                for folder in self.uploads:
                    trim(folder)
            else:
                check_files(body, self.uploads)
            await self.app(scope, _replayed(body, receive), send)
        finally:
            self.open_bodies, self.open_uploads = self.open_bodies - 1, self.open_uploads - is_upload


async def read_body(scope: Scope, receive: Receive, limit: int, seconds: float | None = None) -> bytes:
    """All of it, however it is sent; refused as soon as it is known to be too long, or late."""
    too_long = Refused(413, f"at most {limit:,} bytes")
    length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"0")
    if not length.isdigit() or int(length[:20]) > limit:
        raise too_long
    seconds = BODY_S if seconds is None else seconds
    parts, size, end = [], 0, time.monotonic() + seconds
    while True:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            raise Refused(408, f"the request was not here within {seconds:.0f} s") from None
        if message["type"] == "http.disconnect":
            raise Refused(400, "the request ended early")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def check_files(body: bytes, folders: Sequence[Path]) -> None:
    """Gradio takes any {"path": ...} in a body, of whatever component, for a file to open; URLs it would fetch."""
    if not body:
        return
    try:
        values = [json.loads(body)]
    except (ValueError, RecursionError):
        raise Refused(400, "this is not JSON") from None
    while values:
        value = values.pop()
        if isinstance(value, dict):
            if "path" in value and not is_uploaded(value["path"], folders):
                raise Refused(403, "this file was not uploaded")
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)


def is_uploaded(path: Any, folders: Sequence[Path]) -> bool:
    """A file in one of the folders itself, neither a link nor behind one."""
    if not isinstance(path, str) or not os.path.isabs(path):
        return False
    try:
        real = Path(os.path.realpath(path))
        return os.path.isfile(real) and not os.path.islink(path) and any(f in real.parents for f in folders)
    except (OSError, ValueError):
        return False


def trim(folder: Path) -> None:
    """Room for one more upload: the oldest files go while there are too many bytes or files."""
    files = []
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if not path.is_dir() or path.is_symlink():
            files.append((status.st_mtime, status.st_size, path))
    total, count = sum(size for _, size, _ in files), len(files)
    for _, size, path in sorted(files):
        if total <= KEPT_BYTES - MAX_FILE and count < KEPT_FILES:
            return
        with suppress(OSError):
            path.unlink()
            if path.parent != folder:  # each upload has a folder of its own
                path.parent.rmdir()
        total, count = total - size, count - 1


def _refuse_closed(scope: Scope) -> None:
    if scope["path"].startswith(CLOSED):
        raise Refused(403, "there is nothing here")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, in one piece; after it what the client does."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Message:
        return pending.pop() if pending else await receive()

    return receiving
