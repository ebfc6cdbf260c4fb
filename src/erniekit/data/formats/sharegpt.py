"""The `sharegpt` format: `conversations` of {from, value}, with `system` and `tools` on the row.

Speakers are human, gpt, system, function_call and observation, under any name that data sets use for them. Preference
rows have the prompt in `conversations`, and `chosen` and `rejected`. Called through the tables of formats/; everything
but the names is read by the messages format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.data.formats import messages
from erniekit.data.formats.fields import BadRow, holds
from erniekit.data.formats.message import MessageReader, parsed_json
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation

FIELD = "conversations"
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}


class ShareGptReader(MessageReader):
    role_key, content_key = "from", "value"

    def read(self, item: Any, field: str, place: int = 0) -> ChatMessage:
        return super().read(self._as_message(item, field) if isinstance(item, dict) else item, field, place)

    def _as_message(self, item: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        if "from" not in item and "role" in item:  # a list of messages under the other name
            return item
        speaker = item.get("from")
        role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None:
            raise BadRow("bad_role", f"`{field}.from` is {str(speaker)[:40]!r}; known are {', '.join(_SPEAKERS)}")
        rest = {name: value for name, value in item.items() if name not in ("from", "value")}
        if isinstance(speaker, str) and speaker.lower() == "function_call":
            return {"role": role, "content": None, "tool_calls": _calls(item.get("value"), f"{field}.value"), **rest}
        return {"role": role, "content": item.get("value"), **rest}


def conversations(row: Any, compat: bool) -> list[Conversation]:
    read, unused = messages.read_messages(row, compat, FIELD, ShareGptReader(compat))
    tools = _tools(row)
    if tools or any(message.role == "tool" or message.tool_calls for message in read):
        return messages.one_per_answer(read, tools, unused)
    return [Conversation(read, unused=unused)]


def preference(row: Any, compat: bool) -> Preference:
    given = {**row, "tools": list(_tools(row))} if isinstance(row, dict) and holds(row.get("tools")) else row
    return messages.preference(given, compat, FIELD, ShareGptReader(compat, preference=True))


def _calls(value: Any, field: str) -> list[Any]:
    """One call or several, as JSON text or as objects."""
    given = parsed_json(value, field) if isinstance(value, str) else value
    return given if isinstance(given, list) else [given]


def _tools(row: Any) -> tuple[dict[str, Any], ...]:
    """A bare function is a tool of type function: what chat templates read."""
    tools = messages.read_tools(row)
    return tuple({"type": "function", "function": tool} if _is_bare(tool) else tool for tool in tools)


def _is_bare(tool: Mapping[str, Any]) -> bool:
    return "function" not in tool and isinstance(tool.get("name"), str) and tool.get("type", "function") == "function"
