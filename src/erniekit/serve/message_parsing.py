"""Messages of a chat request as the chat template takes them. Used by request_parsing.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from erniekit.files.json_file import nests_deeper
from erniekit.serve.request_error import RequestError
from erniekit.serve.schema import Message

MAX_ARGUMENT_CHARACTERS = 2**18  # characters of tool calls' arguments that are read as JSON, of a whole request


def message_row(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content)
    out: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def check_contents(messages: Sequence[Message]) -> None:
    """Only an assistant's message that calls tools may come without content."""
    for k, message in enumerate(messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            place = f"messages[{k}].content"
            rule = "" if message.role != "assistant" else "; only one with tool_calls may have none"
            raise RequestError(400, f"{place} is missing: a message of role {message.role} needs it{rule}", param=place)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send back a call's arguments as text; templates need them as objects (parse_arguments)."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(400, "a tool call needs function: {name, arguments}", param="messages")
    return {**call, "function": dict(function)}


def parse_arguments(messages: list[dict[str, Any]]) -> None:
    """The text of arguments is what middleware.py has not looked into. Too long or too deep a one stays text."""
    left = MAX_ARGUMENT_CHARACTERS
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        text = function.get("arguments")
        if not isinstance(text, str) or len(text) > left:
            continue
        left -= len(text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not nests_deeper(value):
            function["arguments"] = value
