"""The `messages` format: OpenAI-style lists of {role, content}, with `weight`/`train` per message or `label` per row.

Preference rows have the prompt in `messages` (or `prompt`), and `chosen` and `rejected`; or these two as whole
conversations. Called through the tables of formats/, and by the erniekit and chatml formats for the same lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from erniekit.data.formats import pairs
from erniekit.data.formats.answers import BESIDE, attached, beside
from erniekit.data.formats.fields import BadRow, flags, holds, named, require, row_named, unread
from erniekit.data.formats.message import MessageReader, encodable, from_cell, parsed_json
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation


def conversations(row: Any, compat: bool) -> list[Conversation]:
    said, unused = read_messages(row, compat)
    return examples(said, read_tools(row), unused)


def examples(
    said: Sequence[ChatMessage], tools: tuple[dict[str, Any], ...], unused: Sequence[str]
) -> list[Conversation]:
    """One example, or with tools one per trained answer."""
    if tools or any(message.role == "tool" or message.tool_calls for message in said):
        return one_per_answer(tuple(said), tools, tuple(unused))
    return [Conversation(tuple(said), unused=tuple(unused))]


def one_per_answer(
    said: tuple[ChatMessage, ...], tools: tuple[dict[str, Any], ...], unused: tuple[str, ...]
) -> list[Conversation]:
    """An example per trained answer; everything before it is its prompt, as a server would send it."""
    before = tuple(replace(message, trained=False) for message in said)
    asked = [i for i, message in enumerate(said) if message.role == "assistant" and message.trained]
    if not asked:
        raise BadRow("untrained", "no assistant message is trained (all labels are 0)")
    return [Conversation((*before[:i], said[i]), tools, unused) for i in asked]


def read_messages(
    row: Any, compat: bool, field: str = "messages", reader: MessageReader | None = None
) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
    """What is said, and the names of fields that hold something else. field: the one that holds the list."""
    if isinstance(row, list):  # a line that is the list itself
        row = {field: row}
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `{field}`, not {row_named(row)}")
    require(row, field)
    items = from_cell(row[field], field)
    if not isinstance(items, list):
        raise BadRow("wrong_type", f"`{field}` must be a list, not {named(items)}")
    reader = reader or MessageReader(compat)
    said = reader.read_all(items, field)
    check_order(said, [f"{field}[{i}]" for i in range(len(said))], field, reader.role_key)
    if not compat:
        said = attached(said, beside(row), field, reader, last=True)
    said = reader.opening(said, row)
    if row.get("label") is not None:
        count = sum(message.role == "assistant" for message in said)
        said = reader.labelled(said, flags(row["label"], "label", count, "assistant message"))
    unused = unread(row, (field, "label", "tools", *reader.row_fields, *(() if compat else BESIDE)))
    return tuple(said), (*unused, *reader.unused)


def listed(value: Any, field: str) -> Any:
    """A cell of a table holds a list of messages as JSON text; any other text is itself, JSON or not."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = parsed_json(value, field)
    except (BadRow, RecursionError):
        return value
    known = all(isinstance(item, dict) and item.get("role", item.get("from")) for item in items)
    return items if items and known else value


def preference(row: Any, compat: bool, field: str = "messages", reader: MessageReader | None = None) -> Preference:
    """field: the one that holds the prompt, if `prompt` does not."""
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a row must be an object with `chosen` and `rejected`, not {row_named(row)}")
    require(row, "chosen", "rejected")
    reader = reader or MessageReader(compat, preference=True)
    known = {"chosen", "rejected", "tools", *reader.row_fields, *(() if compat else ("score_delta", *BESIDE))}
    both = zip(pairs.SIDES, pairs.beside_both(row, compat))
    answers = {name: _answer(row[name], name, reader, given) for name, given in both}
    if all(said[0].role != "assistant" for said in answers.values()):  # whole conversations
        for name, said in answers.items():
            check_order(said, [f"{name}[{i}]" for i in range(len(said))], name, reader.role_key)
        prompt, chosen, rejected = common(*answers.values())
    else:
        asked = field if row.get(field) is not None else "prompt"
        require(row, asked)
        known.add(asked)
        given = listed(row[asked], asked)
        prompt = reader.read_all(given if isinstance(given, list) else [user_says(given)], asked)
        places = [f"{asked}[{i}]" for i in range(len(prompt))]
        for name, said in answers.items():
            order = places + [f"{name}[{i}]" for i in range(len(said))]
            check_order([*prompt, *said], order, name, reader.role_key)
        chosen, rejected = answers.values()
    prompt = reader.opening(prompt, row)
    return Preference(
        tuple(prompt),
        tuple(chosen),
        tuple(rejected),
        read_tools(row),
        pairs.score_delta(row, compat),
        (*unread(row, known), *reader.unused),
    )


def user_says(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(value: Any, field: str, reader: MessageReader, given: Mapping[str, Any]) -> list[ChatMessage]:
    """A text, texts in turn, one message, or a list of messages. given: what stands beside it on the row."""
    value = listed(value, field)
    if isinstance(value, dict):
        return attached([reader.read(value, field)], given, field, reader)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return attached(reader.read_all(value, field), given, field, reader, last=True)
    return list(pairs.answer(value, field, given, reader))


def common(
    chosen: list[ChatMessage], rejected: list[ChatMessage]
) -> tuple[list[ChatMessage], list[ChatMessage], list[ChatMessage]]:
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
    if isinstance(row, dict) and holds(row.get("functions")):
        raise BadRow("tools", "`functions` is OpenAI's older form of `tools`; write them as `tools`")
    value = row.get("tools") if isinstance(row, dict) else None
    if isinstance(value, str) and value.strip():
        value = parsed_json(value, "tools")
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("wrong_type", "`tools` must be a list of objects")
    return tuple(encodable(value, "tools"))


def check_order(
    said: Sequence[ChatMessage], fields: Sequence[str], ends: str = "messages", role_key: str = "role"
) -> None:
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
            raise BadRow(
                "role_order", f"`{fields[i]}.{role_key}` is {message.role} {place}; expected {follows[before]}"
            )
        before = message.role
    if before != "assistant":
        last = f"the last is from {before}" if before else "the list is empty"
        raise BadRow("no_answer", f"`{ends}` must end with an assistant message; {last}")
