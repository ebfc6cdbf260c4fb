"""Chat client: streams answers of a local server over its OpenAI interface. Used by pages/chat.py; standard library.

The address comes from a job's own log, so it is always this machine's; the key from the job's folder.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from erniekit.errors import ErnieKitError

ANSWER_TIMEOUT_S = 600.0
MODELS_TIMEOUT_S = 5.0
# Proxies of the environment are for other machines.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ChatError(ErnieKitError):
    """The server refused, failed or has ended."""


def list_models(url: str, key: str = "") -> list[str]:
    """Names of the model and its adapters."""
    with _request(url + "/models", None, MODELS_TIMEOUT_S, key) as response:
        return [str(one["id"]) for one in json.load(response)["data"]]


def stream_chat(
    url: str, messages: Sequence[Mapping[str, Any]], key: str = "", **options: Any
) -> Iterator[tuple[str, str]]:
    """("thought" or "answer", next piece of text) until it ends. Closing the iterator closes the connection, and the
    server stops generating."""
    body = {"messages": list(messages), "stream": True, **options}
    with _request(url + "/chat/completions", body, ANSWER_TIMEOUT_S, key) as lines:
        for raw in lines:
            line = raw.decode("utf-8", errors="replace").strip()
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ChatError(str(event["error"].get("message", "the server failed")), where="chat", fix="ask again")
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                if delta.get("reasoning_content"):
                    yield "thought", delta["reasoning_content"]
                if delta.get("content"):
                    yield "answer", delta["content"]
    raise ChatError("the answer was interrupted", where="chat", fix="see the server's log; load the model again")


def _request(url: str, body: Mapping[str, Any] | None, seconds: float, key: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data, headers)
    try:
        return _open(request, timeout=seconds)
    except urllib.error.HTTPError as error:
        raise ChatError(_error_message(error), where="chat", fix="") from None
    except (urllib.error.URLError, OSError) as error:
        raise ChatError(f"the server does not answer: {error}", where="chat", fix="load the model again") from None


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
