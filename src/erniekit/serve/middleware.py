"""ASGI middleware: checks Host, API key, body size and JSON, and turns exceptions into error responses without a trace.

Used by api.py. Pure ASGI, so that streams pass through unbuffered.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from erniekit.files.json_file import MAX_DEPTH, RepeatedKey, nests_deeper, unique_keys
from erniekit.log import warn
from erniekit.net.hosts import Hosts, client_group, from_another_site
from erniekit.printable import is_utf8
from erniekit.serve.engines.base import CLIENT
from erniekit.serve.metrics import Metrics
from erniekit.serve.request_error import RequestError, as_json

MAX_BODY_BYTES = 8 * 2**20
MAX_LARGE_BODIES = 4  # larger ones, with pictures in them, that arrive at once
BODY_S = 60.0  # for a whole body to arrive
MAX_VALUES = 2**18  # objects, lists and items of one body: reading and checking this many takes a fraction of a second
_KINDS = {"str", "int", "float", "bool", "dict", "list"}  # pydantic puts them into the place of an error
OPEN = ("/health",)  # without a key: for load balancers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Model = TypeVar("Model", bound=BaseModel)


class Middleware:
    """Outermost: checks Host and key, counts answers, and turns exceptions into error responses without a trace.

    hosts None: any Host will do, and any Origin.
    """

    def __init__(
        self, app: Any, key: str | None, metrics: Metrics, paths: frozenset[str], hosts: Hosts | None = None
    ) -> None:
        self.app, self.key, self.metrics, self.paths, self.hosts = app, key, metrics, paths, hosts
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = 0

        async def counting(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = message["status"]
            await send(message)

        CLIENT.set(client_group(scope["client"][0]) if scope.get("client") else "")
        try:
            self._check(scope)
            await self.app(scope, receive, counting)
        except RequestError as problem:
            await error_response(problem)(scope, receive, counting)
        except Exception as error:
            warn(f"{scope['method']} {scope['path']!r}: {type(error).__name__}: {error}")
            if started == 500:
                return  # reported by the handler inside, which raises it again for us to log
            if started:
                raise  # the connection is cut: half an answer must not look whole
            await error_response(RequestError(500, "the server failed on this request"))(scope, receive, counting)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests[path, started or 499] += 1

    def _check(self, scope: Scope) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in scope["headers"]}:
            # A proxy in front may go by the other one, and take the end of this body for the next client's request.
            raise RequestError(
                400, "send Content-Length or Transfer-Encoding, not both", headers={"Connection": "close"}
            )
        if self.hosts is not None:
            self._check_site(scope, self.hosts)
        if self.key is not None and scope["path"] not in OPEN:
            given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
            scheme, _, token = given.partition(b" ")
            right = hmac.compare_digest(token.strip(), self.key.encode())
            if scheme.lower() != b"bearer" or not right:
                raise RequestError(
                    401,
                    "an API key is needed: Authorization: Bearer KEY"
                    if not given
                    else "this API key is not the server's",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self.draining and scope["method"] == "POST":
            raise RequestError(503, "the server is stopping", code="stopping", headers={"Retry-After": "5"})

    def _check_site(self, scope: Scope, hosts: Hosts) -> None:
        """A browser can be made to send requests here by any page it shows; without a key nothing else tells them
        from those of a program of this machine."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host")  # a health check over HTTP/1.0 may have none
        known = scope["path"] in OPEN if host is None else hosts.allows(host.decode("latin-1"), scope["path"] in OPEN)
        if not known:
            raise RequestError(
                403,
                "this server does not go by the name in the Host header: use its address, name it in server_names, "
                "or give the server a key",
                code="foreign_host",
            )
        if from_another_site(headers):
            raise RequestError(
                403, "a page of another site sent this request: give the server a key", code="foreign_origin"
            )


def error_response(problem: RequestError) -> Response:
    return Response(as_json(problem.body()), problem.status, problem.headers, "application/json")


class BodyLimit:
    """most: bytes of a body. Those beyond MAX_BODY_BYTES are few at a time: they are held in memory."""

    def __init__(self, most: int = MAX_BODY_BYTES) -> None:
        self.most, self.large = most, 0


async def read_json(request: Request, kind: type[Model], limit: BodyLimit | None = None) -> Model:
    """The body as `kind`; a RequestError for anything else that may come."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json":
        raise RequestError(415, "the body must be JSON: Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(415, "the body must not be compressed: leave out the Content-Encoding header")
    try:
        body = await asyncio.wait_for(_body(request, limit or BodyLimit()), BODY_S)
    except asyncio.TimeoutError:
        raise RequestError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise RequestError(400, "the body ended early") from None
    if _has_too_many_values(body):
        raise RequestError(413, f"the body holds more than {MAX_VALUES} values", headers={"Connection": "close"})
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=unique_keys)
    except UnicodeDecodeError:
        raise RequestError(400, "the body is not UTF-8") from None
    except RecursionError:
        raise RequestError(400, f"the body is nested deeper than {MAX_DEPTH}") from None
    except RepeatedKey as error:
        raise RequestError(400, str(error), param=error.key[:60]) from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}"[:200]) from None
    if b"\\ud" in body.lower() and not _is_encodable(value):
        raise RequestError(400, "the body holds half a character: an unpaired \\ud800..\\udfff")
    if nests_deeper(value):
        raise RequestError(400, f"the body is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object: {...}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error) from None


async def _body(request: Request, limit: BodyLimit) -> bytes:
    content_length = request.headers.get("content-length", "")
    if content_length.isascii() and content_length.isdigit() and int(content_length[:20]) > limit.most:
        raise _too_large(limit)
    parts, size, large = [], 0, False
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit.most:
                raise _too_large(limit)
            if size > MAX_BODY_BYTES and not large:
                if limit.large >= MAX_LARGE_BODIES:
                    again = {"Retry-After": "2", "Connection": "close"}
                    raise RequestError(429, "too many large bodies arrive now", code="queue_full", headers=again)
                large = True
                limit.large += 1
            parts.append(part)
        return b"".join(parts)
    finally:
        limit.large -= large


def _has_too_many_values(body: bytes) -> bool:
    """Whether it has more than MAX_VALUES, before anything is made of it: the event loop waits for the parser."""
    if _marks(body) <= MAX_VALUES:
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # then every quote opens or closes a string
    return bare.count(b'"') > 4 * MAX_VALUES or _marks(b"".join(bare.split(b'"')[::2])) > MAX_VALUES


def _marks(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


def _too_large(limit: BodyLimit) -> RequestError:
    # The rest of the body is not read: the connection cannot be used again.
    return RequestError(413, f"the body is larger than {limit.most} bytes", headers={"Connection": "close"})


def _no_number(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is not a number")


def _is_encodable(value: Any) -> bool:
    """Whether all its text can be encoded: JSON may escape halves of surrogate pairs, and no tokenizer takes them."""
    try:
        return is_utf8(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return False


def _validation_error(error: ValidationError) -> RequestError:
    """The first thing wrong, by its place: the others often follow from it. Of a value that may be of several kinds
    every kind has its error; the one that comes furthest into the value is of the kind that was meant."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    start = errors[0]["loc"][:-1]
    found = max((one for one in errors if one["loc"][: len(start)] == start), key=lambda one: len(one["loc"]))
    keys = [key for key in found["loc"] if isinstance(key, int) or (key.isidentifier() and key not in _KINDS)]
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")[:200]
    message = found["msg"].removeprefix("Value error, ")
    return RequestError(422, f"{place}: {message}"[:400] if place else message, param=place or None)
