"""Guard: what every request to the page passes first. Foreign hosts and origins, wrong tokens and stray paths get 403.

Wrapped around the whole application by app.py; plain ASGI, so that streams pass through unbuffered. What it lets in is
held to limits.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from erniekit.config.address import is_loopback
from erniekit.net.hosts import Hosts, from_another_site
from erniekit.webui.limits import Receive, Refused, RequestLimits, Scope, Send

TOKEN = "token"  # of the URL that is printed at the start
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # The page needs nothing from elsewhere; gradio's own code writes styles and evaluates templates.
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; base-uri 'self'; "
        b"form-action 'self'",
    ),
)
# An upload that is opened by its address is no part of the page: no script of it runs, whatever its media type.
FILE_HEADERS = (
    *HEADERS[:-1],
    (b"content-security-policy", b"sandbox; default-src 'none'; img-src 'self'; media-src 'self'"),
)


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Guard:
    """`token` None: none is required, which only a loopback address allows. `files`: folders whose files may be
    requested, and named in requests."""

    def __init__(
        self, app: Any, host: str = "127.0.0.1", port: int = 0, token: str | None = None,
        files: Sequence[str | Path] = (), names: Iterable[str] = (),
    ) -> None:  # fmt: skip
        if token is None and not is_loopback(host):
            raise ValueError("an address that other machines reach needs a token")
        self.token = token
        self.files = [Path(os.path.realpath(f)) for f in files]
        self.app = RequestLimits(app, self.files)
        self.on_close: Callable[[], None] = lambda: None  # called when the server has stopped
        self.hosts = Hosts.of(host, names)
        self.cookie = f"erniekit-{port}"  # two pages on one machine share its cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in reversed(scope["headers"])}
        headers[b"cookie"] = b";".join(value for name, value in scope["headers"] if name.lower() == b"cookie")
        reason = self._check_origin(headers) or self._check_path(scope)
        if reason:
            await refuse(scope, send, reason)
            return
        if self.token is not None and not self._has_cookie(headers):
            query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
            given = next((value for name, value in query if name == TOKEN), "")
            if not equal_secrets(given, self.token):
                await refuse(scope, send, "open the address that was printed when the page was started: it has a token")
            elif scope["type"] == "http":
                await self._set_cookie(scope, send, [(name, value) for name, value in query if name != TOKEN])
            else:
                await self._serve(scope, receive, send)
            return
        headers_of = FILE_HEADERS if "file=" in _decoded(scope["path"]) else HEADERS
        await self._serve(scope, receive, _with_headers(send, headers_of))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Refused as refused:
            await refuse(scope, send, refused.reason, refused.status)

    def _check_origin(self, headers: dict[bytes, bytes]) -> str:
        """A foreign name that was made to point here, or another site's page that presses our buttons."""
        if not self.hosts.allows(headers.get(b"host", b"").decode("latin-1")):
            return "this page has another address"
        return "a page of another address asked for this" if from_another_site(headers) else ""

    def _check_path(self, scope: Scope) -> str:
        """Paths that climb, and files by name from elsewhere than the folders that are served."""
        path = _decoded(scope["path"])
        raw = scope.get("raw_path") or b""
        if "\x00" in path or "\\" in path or ".." in path.split("/") or b"%00" in raw.lower():
            return "there is nothing here"
        _, by_name, file = path.partition("file=")
        if not by_name:
            return ""
        try:
            real = Path(os.path.realpath(file if file.startswith("/") else f"/{file}"))
        except (OSError, ValueError):
            return "there is nothing here"
        return "" if any(folder in real.parents for folder in self.files) else "there is nothing here"

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        """By hand: http.cookies gives up on all of them where one, of another program of this host, is not to its
        taste."""
        pairs = (pair.partition("=") for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"))
        return any(
            name.strip() == self.cookie and equal_secrets(value.strip(), self._cookie_value())
            for name, _, value in pairs
        )

    def _cookie_value(self) -> str:
        """What the cookie holds: not the token of the URL."""
        return hashlib.sha256(f"erniekit {self.token}".encode()).hexdigest()

    async def _set_cookie(self, scope: Scope, send: Send, query: list[tuple[str, str]]) -> None:
        """The token moves from the URL, which is seen and kept, into a cookie."""
        target = "/" + quote(scope["path"].lstrip("/")) + (f"?{urlencode(query)}" if query else "")
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        # Lax, as a Strict cookie would not come back when the address is followed from a page, such as a notebook's
        # terminal. Requests that do something are POSTs, and those of other pages are refused by their origin.
        cookie = f"{self.cookie}={self._cookie_value()}; Path=/; HttpOnly; SameSite=Lax{secure}"
        started = {
            "type": "http.response.start",
            "status": 303,
            "headers": [(b"location", target.encode("latin-1", "ignore")), (b"set-cookie", cookie.encode()), *HEADERS],
        }
        await send(started)
        await send({"type": "http.response.body", "body": b""})


async def refuse(scope: Scope, send: Send, reason: str, status: int = 403) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:100]})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *HEADERS]
    if status != 403:  # the rest of the body is not read
        headers += [(b"connection", b"close")] + ([(b"retry-after", b"2")] if status == 503 else [])
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{status}: {reason}\n".encode()})


def equal_secrets(given: str, expected: str) -> bool:
    """In constant time, so that a caller cannot measure how many characters were right."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _decoded(path: str) -> str:
    """As often as it was encoded: a server behind this one may decode once more."""
    for _ in range(3):
        plain = unquote(path)
        if plain == path:
            break
        path = plain
    return path


def _with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            have = {name.lower() for name, _ in message.get("headers", ())}
            more = [(name, value) for name, value in headers if name not in have]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending
