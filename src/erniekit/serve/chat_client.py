"""An OpenAI-compatible server seen from the terminal: which models it has, and an answer piece by piece.

Used by chat.py. The standard library does all of it, so that a client needs no extra and imports no torch.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from erniekit.errors import ConfigError, ErnieKitError
from erniekit.serve.output_parser import Delta, OutputParser
from erniekit.serve.request_error import NO_NUMBER

CONNECT_S = 5.0
LINE_BYTES = 8 * 2**20  # of one event; also of a whole answer
# An address for listening everywhere is no address to call.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class NoAnswer(ErnieKitError):
    """A server that is absent, refuses or breaks off. status: what it replied, 0 when it did not."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", status: int = 0) -> None:
        super().__init__(what, where=where, fix=fix)
        self.status = status


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    path: str = "/v1"
    secure: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


def is_address(text: str) -> bool:
    """http://host:port, with or without /v1, or host:port."""
    return bool(re.match(r"https?://", text, re.IGNORECASE) or re.fullmatch(r"(\[[\da-fA-F:]+\]|[\w.-]+):\d+", text))


def address_of(text: str) -> Address:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        secure = parts.scheme.lower() == "https"
        port = parts.port or (443 if secure else 80)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host:
        raise ConfigError(f"{text} is not a server's address", where="command line", fix="http://HOST:PORT")
    if parts.username is not None:
        raise ConfigError(
            "a server's address holds a name or a password, which other users of this machine can read",
            where="command line",
            fix="put the key into a file: api_key_file=FILE, or into ERNIEKIT_API_KEY",
        )
    path = parts.path.rstrip("/")
    return Address(EVERYWHERE.get(host, host), port, path if path.endswith("/v1") else f"{path}/v1", secure)


@dataclass
class ChatAnswer:
    """The answer so far. finish: stop, length, interrupt, or the server's own finish reason."""

    text: str = ""
    thought: str = ""
    finish: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass
class Client:
    """timeout: seconds without data from the server. model: the one to request, once `choose_model` has run.
    place: what messages call the server; empty: its address."""

    address: Address
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    model: str = "default"
    place: str = ""

    @property
    def where(self) -> str:
        return self.place or self.address.url

    def choose_model(self, wanted: str | None = None) -> None:
        """The first the server offers, or the one requested by name."""
        try:
            with self._request("GET", "/models", None) as response:
                page = json.loads(response.read(LINE_BYTES))
            names = [str(card["id"]) for card in page["data"]]
        except NoAnswer as error:
            if error.status != 404:
                raise
            names = []  # servers without that page accept `default`
        except (ValueError, TypeError, KeyError):
            raise NoAnswer(
                "the program at that address is not an OpenAI-compatible server",
                where=self.where,
                fix="check host and port",
            ) from None
        if wanted and names and wanted not in names:
            raise ConfigError(
                f"the server has no model {wanted!r}", where="served_model_name", fix=f"one of: {', '.join(names)}"
            )
        self.model = wanted or (names[0] if names else "default")

    def answer(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], into: ChatAnswer
    ) -> Generator[Delta, None, None]:
        """Reasoning and text as they come, collected in `into`. Closing the iterator disconnects: the server stops."""
        body = {"model": self.model, "messages": list(messages), **options}
        try:
            yield from self._answer(body, into)
        except NoAnswer as error:
            if into.text or into.thought or "max_tokens" not in body or not _exceeds_context(error):
                raise
            # Many servers refuse a longest answer for which the rest of the context is too short. It is a limit, not
            # a request for that many tokens: without it the context is the limit.
            yield from self._answer({name: value for name, value in body.items() if name != "max_tokens"}, into)

    def _answer(self, body: dict[str, Any], into: ChatAnswer) -> Iterator[Delta]:
        with self._request("POST", "/chat/completions", body) as response:
            parser = OutputParser()  # servers that do not separate reasoning leave its tags in the text
            events = self._events(response) if body.get("stream") else self._whole(response)
            for event in events:
                for delta in _deltas(event, parser, into):
                    yield _book(delta, into)
            for delta in parser.add("", last=True):
                yield _book(delta, into)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        while line := response.readline(LINE_BYTES):
            field, _, data = line.strip().partition(b":")
            if field != b"data":
                continue  # a comment that keeps the line open, or a field OpenAI does not use
            if data.strip() == b"[DONE]":
                return
            event = self._read(data)
            if event.get("error"):
                self._refused(0, event)
            yield event
        raise NoAnswer("the server closed the connection", where=self.where, fix="see the server's log, and retry")

    def _whole(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        event = self._read(response.read())
        event.pop("usage", None)  # sent unrequested here; in a stream only on request
        for choice in event.get("choices") or ():
            choice["delta"] = choice.get("message") or {}
        yield event

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise NoAnswer("the server's reply is not a chat completion", where=self.where, fix="check the URL")
        return event

    @contextmanager
    def _request(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.address.secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        with closing(kind(self.address.host, self.address.port, timeout=CONNECT_S)) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(self.timeout)
            except (OSError, UnicodeError) as error:
                raise self._absent(error) from None
            try:
                connection.request(method, self.address.path + path, data, headers)
                # Closing only the connection leaves the socket open: the response reads from its own file.
                with closing(connection.getresponse()) as response:
                    if response.status != 200:
                        self._refused(response.status, self._error(response))
                    yield response
            except TimeoutError:
                raise NoAnswer(
                    f"the server sent nothing for {self.timeout:g} s",
                    where=self.where,
                    fix="raise request_timeout",
                ) from None
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(
                    f"the connection broke: {error or type(error).__name__}",
                    where=self.where,
                    fix="see whether the server still runs, and retry",
                ) from None

    def _absent(self, error: Exception) -> NoAnswer:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return NoAnswer(
            f"no server answers: {why}",
            where=self.where,
            fix=f"start one: erniekit server DIR --port {self.address.port}; or open a folder: erniekit chat DIR",
        )

    def _error(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            reply = json.loads(response.read(LINE_BYTES))
        except (ValueError, RecursionError):
            reply = None
        return reply if isinstance(reply, dict) else {}

    def _refused(self, status: int, reply: Mapping[str, Any]) -> NoReturn:
        """The server's message: in OpenAI's format, or in one of those seen elsewhere."""
        error = reply.get("error") or reply
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if match := _THREE_LINES.fullmatch(str(message)[:2000]):
            raise NoAnswer(match[1], where=match[2], fix=match[3], status=status)
        fixes = {
            401: "give the server's key: api_key_file=FILE, or ERNIEKIT_API_KEY",
            404: "check the URL and served_model_name",
            429: "the server is busy: retry",
            405: "check the URL: no OpenAI-compatible server answers there",
            501: "check the URL: no OpenAI-compatible server answers there",
            503: "the server is starting or stopping: retry",
        }
        fix = fixes.get(status, "change the key it names, or reset the conversation with 'clear'")
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            fix = "send less text, lower max_new_tokens, or reset the conversation with 'clear'"
        if NO_NUMBER in str(message):
            fix = "its weights or adapter are damaged or not trained: name another checkpoint; erniekit eval checks one"
        text = " ".join(str(message or f"status {status}").split())[:500]
        raise NoAnswer(f"the server refused: {text}", where=self.where, fix=fix, status=status)


# An error of an erniekit server with its own place and fix.
_THREE_LINES = re.compile(r"error: (.+)\nwhere: (.+)\nfix: +(.+)")


def _exceeds_context(error: NoAnswer) -> bool:
    return error.status == 400 and any(phrase in error.what.lower() for phrase in ("context", "max_tokens", "too long"))


def _deltas(event: Mapping[str, Any], parser: OutputParser, into: ChatAnswer) -> Iterator[Delta]:
    into.usage = event.get("usage") or into.usage
    choices = event.get("choices") or [{}]
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thought, str) and thought:
        yield Delta("reasoning", thought)
    if isinstance(delta.get("content"), str):
        yield from parser.add(delta["content"])
    into.finish = choice.get("finish_reason") or into.finish


def _book(delta: Delta, into: ChatAnswer) -> Delta:
    if delta.kind == "reasoning":
        into.thought += delta.text
    else:
        into.text += delta.text
    return delta
