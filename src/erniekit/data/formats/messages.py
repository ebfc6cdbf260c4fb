"""The `messages` format: OpenAI-style lists of {role, content}, with `weight`/`train` per message or `label` per row.

Preference rows have the prompt in `messages` (or `prompt`), and `chosen` and `rejected`; or these two as whole
conversations. Called through the tables of formats/, and by the erniekit and chatml formats for the same lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from erniekit.data.formats import pairs
from erniekit.data.formats.fields import BadRow, flag, flags, named, require, text
from erniekit.data.preference import Preference
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


def preference(row: Any, compat: bool) -> Preference:
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {named(row)}")
    require(row, "chosen", "rejected")
    answers = {field: _answer(row[field], field, compat) for field in ("chosen", "rejected")}
    if all(said[0].role != "assistant" for said in answers.values()):  # whole conversations
        for field, said in answers.items():
            _check_order(said, [f"{field}[{i}]" for i in range(len(said))], field)
        prompt, chosen, rejected = _common(*answers.values())
    else:
        asked = "messages" if row.get("messages") is not None else "prompt"
        require(row, asked)
        given = row[asked] if isinstance(row[asked], list) else [{"role": "user", "content": row[asked]}]
        prompt = [_message(item, f"{asked}[{i}]") for i, item in enumerate(given)]
        places = [f"{asked}[{i}]" for i in range(len(prompt))]
        for field, said in answers.items():
            _check_order([*prompt, *said], places + [f"{field}[{i}]" for i in range(len(said))], field)
        chosen, rejected = answers.values()
    if prompt[0].role == "system" and not prompt[0].content:
        prompt = prompt[1:]
    return Preference(tuple(prompt), tuple(chosen), tuple(rejected), read_tools(row), pairs.score_delta(row, compat))


def _answer(value: Any, field: str, compat: bool) -> list[Message]:
    """A text, texts in turn, one message, or a list of messages."""
    if isinstance(value, dict):
        return [_message(value, field)]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_message(item, f"{field}[{i}]") for i, item in enumerate(value)]
    return list(pairs.answer(value, field, compat))


def _common(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """Two whole conversations: what they begin with alike, through its last question, and how each goes on."""
    end = 0
    while end < min(len(chosen), len(rejected)) - 1 and chosen[end] == rejected[end]:
        end += 1
    while end and chosen[end - 1].role not in ("user", "tool"):
        end -= 1
    if not end:
        raise BadRow("no_question", "`chosen` and `rejected` do not begin with the same question")
    return chosen[:end], chosen[end:], rejected[end:]


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


def _check_order(said: Sequence[Message], fields: Sequence[str] = (), ends: str = "messages") -> None:
    """system?, then user -> assistant turns; tool results only after an assistant; an answer last.

    `fields` names each message's place in the row, `ends` the field that holds the last.
    """
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
            field = fields[i] if fields else f"messages[{i}]"
            raise BadRow("role_order", f"`{field}.role` is {message.role} {place}; expected {follows[before]}")
        before = message.role
    if before != "assistant":
        last = f"the last is from {before}" if before else "the list is empty"
        raise BadRow("no_answer", f"`{ends}` must end with an assistant message; {last}")
