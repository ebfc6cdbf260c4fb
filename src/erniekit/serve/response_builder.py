"""Builds OpenAI's response objects: whole responses and chunks of a stream, chat and completions. Used by api.py."""

from __future__ import annotations

import json.encoder
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from erniekit.serve.engines.base import Token
from erniekit.serve.output_parser import Delta
from erniekit.serve.request_error import as_json
from erniekit.serve.running_request import ChoiceDelta, RunningRequest


class ResponseBuilder:
    """The responses of one request."""

    def __init__(self, running_request: RunningRequest, logprobs: bool) -> None:
        prepared = running_request.prepared
        self.running_request, self.chat, self.logprobs = running_request, prepared.chat, logprobs
        self.tokenizer, self.echo = prepared.served.tokenizer, prepared.echo
        self.head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": prepared.served.name,
        }
        self._offsets = [0] * len(running_request.choices)
        self._begun: set[int] = set()
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._spelled: dict[int, bytes] = {}  # single tokens: the likeliest ones come again and again

    # --- a stream

    def events(self, part: ChoiceDelta, usage: bool) -> bytes:
        """The server-sent events of one part."""
        plain = not self.logprobs and part.finish is None and part.number in self._begun
        if plain and len(part.deltas) == 1 and part.deltas[0].kind == "content":
            # Nearly all of a stream: only the text differs from one event to the next.
            if (around := self._around.get(part.number)) is None:
                around = self._around[part.number] = self._text_event(part.number, usage)
            text = json.encoder.encode_basestring(part.deltas[0].text).encode("utf-8", "replace")
            return around[0] + text + around[1]
        chunks = ({**chunk, "usage": None} if usage else chunk for chunk in self.chunks(part))
        return b"".join(map(as_event, chunks))

    def _text_event(self, number: int, usage: bool) -> tuple[bytes, bytes]:
        """What comes before and after the text of an event."""
        mark = uuid.uuid4().hex  # occurs in no name
        chunk = self._chunk(number, {"delta": {"content": mark}} if self.chat else {"text": mark}, None, None)
        before, _, behind = as_event({**chunk, "usage": None} if usage else chunk).partition(f'"{mark}"'.encode())
        return before, behind

    def chunks(self, part: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """The chunks of one part; the last of an answer carries its finish_reason."""
        logprobs = self._logprobs(part.tokens, part.number) if self.logprobs and part.tokens else None
        pieces = [self._delta(delta) for delta in part.deltas]
        if not pieces and (logprobs is not None or part.finish is not None):
            pieces = [self._delta(None)]
        for k, piece in enumerate(pieces):
            first = part.number not in self._begun
            self._begun.add(part.number)
            if first and self.chat:
                piece = {"role": "assistant", **piece}
            elif first and self.echo:
                piece = self.echo[part.number] + piece
            body = {"delta": piece} if self.chat else {"text": piece}
            last = k == len(pieces) - 1
            yield self._chunk(part.number, body, logprobs if k == 0 else None, part.finish if last else None)

    def _chunk(self, number: int, body: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        choice = {"index": number, **body, "logprobs": logprobs, "finish_reason": finish}
        return {**self.head, "object": kind, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": [], "usage": self.running_request.usage()}

    def _delta(self, delta: Delta | None) -> Any:
        if not self.chat:
            return "" if delta is None else delta.text
        if delta is None:
            return {}
        if delta.kind == "tool":
            return {"tool_calls": [delta.call]}
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}

    # --- a whole answer

    def whole(self, parts: Sequence[ChoiceDelta]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        by_choice: list[list[Delta]] = [[] for _ in self.running_request.choices]
        for part in parts:
            by_choice[part.number] += part.deltas
        for number, (choice, deltas) in enumerate(zip(self.running_request.choices, by_choice)):
            logprobs = self._logprobs(choice.tokens, number) if self.logprobs else None
            body = {"message": _message(deltas)} if self.chat else {"text": self._text(number, deltas)}
            choices.append({"index": number, **body, "logprobs": logprobs, "finish_reason": choice.finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.running_request.usage()}

    def _text(self, number: int, deltas: Sequence[Delta]) -> str:
        return (self.echo[number] if self.echo else "") + "".join(delta.text for delta in deltas)

    # --- log probabilities

    def _logprobs(self, tokens: Sequence[Token], number: int) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._token_logprobs(token) for token in tokens], "refusal": None}
        texts = [self._token_text(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(text)
        top = [{self._token_text(id): value for id, value in t.top} for t in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _token_text(self, id: int) -> str:
        return self._token_bytes(id).decode("utf-8", "replace")

    def _token_bytes(self, id: int) -> bytes:
        if id not in self._spelled:
            self._spelled[id] = self.tokenizer.bytes_of(id)
        return self._spelled[id]

    def _token_logprobs(self, token: Token) -> dict[str, Any]:
        def one(id: int, value: float | None) -> dict[str, Any]:
            return {"token": self._token_text(id), "logprob": value, "bytes": list(self._token_bytes(id))}

        return {**one(token.id, token.logprob), "top_logprobs": [one(id, value) for id, value in token.top]}


def as_event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


def _message(deltas: Sequence[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    thought = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls = [{k: v for k, v in delta.call.items() if k != "index"} for delta in deltas if delta.call]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
