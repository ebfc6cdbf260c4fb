"""The `messages` format: OpenAI-style lists of {role, content}, with `weight`/`train` per message or `label` per row.

Called through the FORMATS table, and by the erniekit and chatml formats for the same lists.
"""

from __future__ import annotations

import json
from typing import Any

from erniekit.data.formats.fields import BadRow, flag, flags, named, require, text
from erniekit.data.types import Conversation, Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def conversations(row: Any, compat: bool) -> list[Conversation]:
    said = read_messages(row)
    tools = read_tools(row)
    if tools or any(message.role == "tool" or message.tool_calls for message in said):
        return one_per_answer(said, tools)
    return [Conversation(said)]


def one_per_answer(said: tuple[Message, ...], tools: tuple[dict[str, Any], ...]) -> list[Conversation]:
    """An example per trained answer; everything before it is its prompt, as a server would send it."""
    out = []
    for i, message in enumerate(said):
        if message.role == "assistant" and message.trained:
            before = tuple(Message(m.role, m.content, False, m.tool_calls) for m in said[:i])
            out.append(Conversation((*before, message), tools))
    if not out:
        raise BadRow("untrained", "no assistant message is trained (all labels are 0)")
    return out


def read_messages(row: Any) -> tuple[Message, ...]:
    if isinstance(row, list):  # a line that is the list itself
        row = {"messages": row}
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `messages`, not {named(row)}")
    require(row, "messages")
    if not isinstance(row["messages"], list):
        raise BadRow("wrong_type", f"`messages` must be a list, not {named(row['messages'])}")
    said = [_message(item, f"messages[{i}]") for i, item in enumerate(row["messages"])]
    _check_order(said)
    if said[0].role == "system" and not said[0].content:
        said = said[1:]
    if row.get("label") is not None:
        count = sum(message.role == "assistant" for message in said)
        trained = iter(flags(row["label"], "label", count, "assistant messages"))
        said = [Message(m.role, m.content, next(trained), m.tool_calls) if m.role == "assistant" else m for m in said]
    return tuple(said)


def read_tools(row: Any) -> tuple[dict[str, Any], ...]:
    value = row.get("tools") if isinstance(row, dict) else None
    if isinstance(value, str) and value.strip():
        value = _json(value, "tools")
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("wrong_type", "`tools` must be a list of objects")
    return tuple(_checked(value, "tools"))


def _message(item: Any, field: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow("wrong_type", f"`{field}` must be an object with `role` and `content`, not {named(item)}")
    given = item.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRow("bad_role", f"`{field}.role` is {str(given)[:40]!r}; known are {', '.join(ROLES)}")
    calls = _tool_calls(item.get("tool_calls"), f"{field}.tool_calls") if role == "assistant" else ()
    content = _content(item.get("content"), f"{field}.content")
    if not content.strip() and not calls and role in ("user", "assistant"):
        raise BadRow("empty_text", f"`{field}.content` is empty")
    trained = True
    for key in ("weight", "train"):
        if role == "assistant" and item.get(key) is not None:
            trained = flag(item[key], f"{field}.{key}")
    return Message(role, content, trained, calls)


def _content(value: Any, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, list):
        return text(value, field, empty=True)
    parts = []
    for i, part in enumerate(value):  # OpenAI content parts
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            raise BadRow("not_text", f"`{field}[{i}]` is not a text part; images and video need stage VL-SFT")
        parts.append(text(part.get("text"), f"{field}[{i}].text", empty=True))
    return "".join(parts)


def _tool_calls(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not value:
        return ()
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"`{field}` must be a list, not {named(value)}")
    out = []
    for i, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("wrong_type", f"`{field}[{i}]` must hold a `function` with a `name`")
        arguments = function.get("arguments")
        if isinstance(arguments, str):  # OpenAI writes them as JSON text; templates want the object
            arguments = _json(arguments, f"{field}[{i}].function.arguments") if arguments.strip() else {}
        if not isinstance(arguments, (dict, type(None))):
            raise BadRow("wrong_type", f"`{field}[{i}].function.arguments` must be an object, not {named(arguments)}")
        out.append({"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}})
    return tuple(_checked(out, field))


def _json(value: str, field: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRow("bad_json", f"`{field}` is text that is not JSON: {error}") from None


def _checked(value: Any, field: str) -> Any:
    """All strings inside can be tokenised."""
    try:
        text(json.dumps(value, ensure_ascii=False), field)
    except TypeError as error:  # parquet has types JSON has not
        raise BadRow("wrong_type", f"`{field}` cannot be written as JSON: {error}") from None
    return value


def _check_order(said: list[Message]) -> None:
    """system?, then user -> assistant turns; tool results only after an assistant; an answer last."""
    before = ""
    follows = {
        "": "user",
        "system": "user",
        "user": "assistant",
        "assistant": "user or tool",
        "tool": "assistant or tool",
    }
    for i, message in enumerate(said):
        if message.role == "system" and i == 0:
            before = "system"
            continue
        if message.role not in follows[before].split(" or "):
            place = f"after {before}" if before else "first"
            raise BadRow("role_order", f"`messages[{i}].role` is {message.role} {place}; expected {follows[before]}")
        before = message.role
    if before != "assistant":
        last = f"the last is from {before}" if before else "the list is empty"
        raise BadRow("no_answer", f"`messages` must end with an assistant message; {last}")
