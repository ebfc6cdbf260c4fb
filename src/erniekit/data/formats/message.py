"""One {role, content} message of a row, and every field besides these two: honoured, refused, or named as not used.

Called by the messages format, whose lists the chatml and erniekit formats read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from erniekit.data.formats.fields import BadRow, flag, general, holds, named, text, unread
from erniekit.data.thinking import FIELDS, THINK, THOUGHT, divided
from erniekit.data.types import ChatMessage

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What data sets call "this answer is trained".
_TRAINED, _TRAINED_COMPAT = ("weight", "train", "loss"), ("weight", "train")
_THOUGHT_PARTS = ("thinking", "reasoning")  # types of content parts


class MessageReader:
    """Reads the messages of one row. `unused` names what they hold beyond that. `compat` reads what ERNIEKit read;
    in a `preference` the assistant's text is scored whatever a message's own flag."""

    role_key, content_key = "role", "content"

    def __init__(self, compat: bool, preference: bool = False) -> None:
        self.compat, self.preference = compat, preference
        self.row_fields = () if compat else ("system",)
        self._unused: dict[str, None] = {}  # in the order they are met
        self._flagged: set[int] = set()  # messages with their own flag whether they are trained

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(self._unused)

    def read_all(self, items: Sequence[Any], field: str) -> list[ChatMessage]:
        return [self.read(item, f"{field}[{i}]", i) for i, item in enumerate(items)]

    def read(self, item: Any, field: str, place: int = 0) -> ChatMessage:
        if not isinstance(item, dict):
            keys = f"`{self.role_key}` and `{self.content_key}`"
            raise BadRow("wrong_type", f"`{field}` must be an object with {keys}, not {named(item)}")
        given = item.get("role")
        role = ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            known_roles = ", ".join(ROLES)
            raise BadRow("bad_role", f"`{field}.{self.role_key}` is {str(given)[:40]!r}; known are {known_roles}")
        if holds(item.get("function_call")):
            raise BadRow("tools", f"`{field}.function_call` is OpenAI's older form; write it as `tool_calls`")
        known = ["role", "content"]
        calls, trained, thought = self._assistants(item, field, known, place) if role == "assistant" else ((), True, "")
        content, inline_thought = self._content(item.get("content"), f"{field}.{self.content_key}", role)
        if thought and inline_thought and thought != inline_thought:
            raise BadRow("two_thoughts", f"`{field}` holds two different thoughts")
        content, thought = self._one_thought(content, thought or inline_thought, field)
        if not content.strip() and not calls and role in ("user", "assistant"):
            raise BadRow("empty_text", f"`{field}.{self.content_key}` is empty")
        if len(item) > 2:
            # Only assistant messages are trained: the same flag on a user's message changes nothing.
            extra = {name: value for name, value in item.items() if name not in _TRAINED or value not in (0, False)}
            self._note(extra if role != "assistant" else item, known, f"{field}.")
        return ChatMessage(role, content, trained, calls, thought)

    def opening(self, messages: list[ChatMessage], row: Mapping[str, Any]) -> list[ChatMessage]:
        """With the row's own `system` text in front. An empty system message is none."""
        if messages[0].role == "system" and not messages[0].content:
            messages = messages[1:]
        if "system" not in self.row_fields or not holds(row.get("system")):
            return messages
        system = text(row["system"], "system", empty=True)
        if messages[0].role == "system" and messages[0].content != system:
            raise BadRow("two_systems", "the row has `system` and a system message with another text")
        return (
            messages
            if messages[0].role == "system" or not system.strip()
            else [ChatMessage("system", system), *messages]
        )

    def labelled(self, messages: list[ChatMessage], labels: Sequence[bool]) -> list[ChatMessage]:
        """`label` of the row decides, and must not contradict a message's own flag."""
        trained = iter(labels)
        out = [replace(m, trained=next(trained)) if m.role == "assistant" else m for m in messages]
        if self._flagged and not self.compat and out != messages:
            raise BadRow("bad_label", "`label` of the row and `weight`, `train` or `loss` of a message disagree")
        return out

    def _note(self, item: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        self._unused.update(dict.fromkeys(unread(item, known, where)))

    def _assistants(
        self, item: Mapping[str, Any], field: str, known: list[str], place: int
    ) -> tuple[tuple[dict[str, Any], ...], bool, str]:
        """Tool calls, whether it is trained, and its thought: what only an answer has."""
        known += ["tool_calls", *(_TRAINED_COMPAT if self.compat else _TRAINED), *(() if self.compat else FIELDS)]
        flags = {}
        for key in _TRAINED_COMPAT if self.compat else _TRAINED:
            if item.get(key) is not None:
                flags[key] = flag(item[key], f"{field}.{key}")
        if len(set(flags.values())) > 1 and not self.compat:
            raise BadRow("bad_label", f"`{field}` is marked both as trained and as not trained: {', '.join(flags)}")
        trained = list(flags.values())[-1] if flags else True
        if flags:
            self._flagged.add(place)
            if self.preference and not trained:
                self._unused.update({f"{general(field)}.{key}": None for key in flags})
        calls = self._tool_calls(item.get("tool_calls"), f"{field}.tool_calls")
        return calls, trained, "" if self.compat else _thought(item, field)

    def _content(self, value: Any, field: str, role: str) -> tuple[str, str]:
        """The text, and the thought of parts that are one."""
        if value is None:
            return "", ""
        if not isinstance(value, list):
            return text(value, field, empty=True), ""
        parts, thoughts = [], []
        for i, part in enumerate(value):  # OpenAI content parts
            kind = part.get("type", "text") if isinstance(part, dict) else None
            if kind in _THOUGHT_PARTS and role == "assistant" and not self.compat:
                name = next((name for name in (kind, "text") if isinstance(part.get(name), str)), kind)
                thoughts.append(text(part.get(name), f"{field}[{i}].{name}", empty=True))
                known = ("type", name)
            elif kind == "text":
                parts.append(text(part.get("text"), f"{field}[{i}].text", empty=True))
                known = ("type", "text")
            else:
                raise BadRow("not_text", f"`{field}[{i}]` is not a text part; images and video need stage VL-SFT")
            if len(part) > 2:
                self._note(part, known, f"{field}[{i}].")
        return "".join(parts), _bare("\n".join(thoughts), field)

    def _one_thought(self, content: str, thought: str, field: str) -> tuple[str, str]:
        """A thought in a field of its own may stand in the content once more; two different ones cannot be right."""
        if not thought:
            return content, ""
        inside, answer = divided(content)
        if inside and inside != thought:
            raise BadRow("two_thoughts", f"`{field}` has one thought in its content and another in a field of its own")
        return answer if inside else content, thought

    def _tool_calls(self, value: Any, field: str) -> tuple[dict[str, Any], ...]:
        if not value:
            return ()
        if not isinstance(value, list):
            raise BadRow("wrong_type", f"`{field}` must be a list, not {named(value)}")
        out = []
        for i, call in enumerate(value):
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise BadRow("wrong_type", f"`{field}[{i}]` must hold a `function` with a `name`")
            place = f"{field}[{i}]."
            if function is not call:
                self._note(call, ("type", "function"), place)
                place += "function."
            self._note(function, ("type", "name", "arguments"), place)
            arguments = function.get("arguments")
            if isinstance(arguments, str):  # OpenAI writes them as JSON text; templates need the object
                arguments = parsed_json(arguments, f"{field}[{i}].function.arguments") if arguments.strip() else {}
            if not isinstance(arguments, (dict, type(None))):
                given = named(arguments)
                raise BadRow("wrong_type", f"`{field}[{i}].function.arguments` must be an object, not {given}")
            out.append({"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}})
        return tuple(encodable(out, field))


def _thought(item: Mapping[str, Any], field: str) -> str:
    """Under whichever name; under several if they are the same."""
    given = {name: text(item[name], f"{field}.{name}", empty=True) for name in FIELDS if item.get(name) is not None}
    thoughts = {name: thought for name, value in given.items() if (thought := _bare(value, f"{field}.{name}"))}
    if len(set(thoughts.values())) > 1:
        raise BadRow("two_thoughts", f"`{field}` holds different thoughts in {', '.join(thoughts)}")
    return next(iter(thoughts.values()), "")


def _bare(value: str, field: str) -> str:
    """Without the tags some data sets keep around it."""
    thought = value.strip().removeprefix(THINK).removesuffix(THOUGHT).strip()
    if THOUGHT in thought:
        raise BadRow("bad_thought", f"`{field}` holds {THOUGHT}, which would end the thought before its end")
    return thought


def parsed_json(value: str, field: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRow("bad_json", f"`{field}` is text that is not JSON: {error}") from None


def from_cell(value: Any, field: str) -> Any:
    """A list, which a cell of a table holds as JSON text."""
    return parsed_json(value, field) if isinstance(value, str) and value.lstrip().startswith("[") else value


def encodable(value: Any, field: str) -> Any:
    """All strings inside can be tokenised."""
    try:
        text(json.dumps(value, ensure_ascii=False), field)
    except TypeError as error:  # parquet has types JSON has not
        raise BadRow("wrong_type", f"`{field}` cannot be written as JSON: {error}") from None
    return value
