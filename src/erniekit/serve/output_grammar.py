"""What the text of an answer must be: JSON of a schema, or calls of functions.

Used by request_parsing.py and structured.py. A grammar is made of a request's `response_format`, `tools` and
`tool_choice`; grammar_work.py compiles it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from erniekit.serve.output_parser import TOOL_CALL, TOOL_CALL_END
from erniekit.serve.request_error import RequestError
from erniekit.serve.schema import ChatRequest, Tool

MAX_SCHEMA_CHARACTERS = 2**16  # of one schema as JSON
MAX_SCHEMA_OBJECTS = 1000  # of all schemas of a request: compiling grows with their square
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FORMATS = ("text", "json_object", "json_schema")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class JsonPart:
    """A JSON value of a schema between two fixed texts."""

    before: str
    schema: str  # as JSON, so that a grammar can be a key
    after: str
    place: str  # of the schema in the request


@dataclass(frozen=True)
class OutputGrammar:
    """One of `parts`; repeated: one or more."""

    parts: tuple[JsonPart, ...]
    param: str  # the request's field
    repeated: bool = False


def output_grammar(request: ChatRequest) -> OutputGrammar | None:
    """None: the answer is free."""
    answer, forced = _format_part(request), _forced_tools(request)
    if answer is not None and forced is not None:
        raise RequestError(400, "response_format and a forced tool_choice exclude each other", param="tool_choice")
    if answer is None and forced is None:
        return None
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
        if getattr(request, name):
            where = "response_format" if forced is None else "tool_choice"
            raise RequestError(
                400, f"{name} cannot be combined with {where}: the schema determines the answer", param=name
            )
    if answer is not None:
        # Offered tools stay an alternative to the answer.
        tools = request.tools if request.tool_choice != "none" else None
        calls = [_call_part(k, tool) for k, tool in enumerate(tools or ())]
        return _checked(OutputGrammar((answer, *calls), "response_format"))
    parts = tuple(_call_part(k, tool) for k, tool in forced or ())
    several = request.tool_choice == "required" and request.parallel_tool_calls is not False
    return _checked(OutputGrammar(parts, "tool_choice", several))


def _format_part(request: ChatRequest) -> JsonPart | None:
    given = request.response_format or {"type": "text"}
    kind = given.get("type")
    if kind not in FORMATS:
        raise RequestError(
            400, f"response_format.type is one of {', '.join(FORMATS)}, not {kind!r}"[:200], param="response_format"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonPart("", '{"type": "object"}', "", "response_format")
    held = given.get("json_schema")
    if not isinstance(held, dict):
        raise RequestError(
            400, "response_format needs json_schema: {name, schema}", param="response_format.json_schema"
        )
    return _json_part("", held.get("schema", {"type": "object"}), "", "response_format.json_schema.schema")


def _forced_tools(request: ChatRequest) -> list[tuple[int, Tool]] | None:
    """The tools of which one must be called, with their places; None: none has to be."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    tools = list(enumerate(request.tools or ()))
    if not tools:
        raise RequestError(400, "tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return tools
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            400,
            'tool_choice is none, auto, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    named = [(k, tool) for k, tool in tools if tool.function.get("name") == name]
    if not named:
        raise RequestError(400, f"tool_choice: tools hold no function {name!r}"[:200], param="tool_choice")
    return named[:1]


def _call_part(number: int, tool: Tool) -> JsonPart:
    """In the form that output_parser.py reads and tool templates show."""
    name = tool.function.get("name")
    place = f"tools[{number}].function"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            400, f"{place}.name: letters, digits, _, . and -, 64 at most, are needed here", param=f"{place}.name"
        )
    given = tool.function.get("parameters")
    before = f'{TOOL_CALL}\n{{"name": "{name}", "arguments": '
    schema = NO_PARAMETERS if given is None else given
    return _json_part(before, schema, f"}}\n{TOOL_CALL_END}", f"{place}.parameters")


def _json_part(before: str, schema: Any, after: str, place: str) -> JsonPart:
    if not isinstance(schema, dict | bool):
        raise RequestError(400, f"{place}: a JSON schema is an object", param=place)
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise RequestError(
            400, f"{place}: {len(text):,} characters; a schema may have {MAX_SCHEMA_CHARACTERS:,}", param=place
        )
    return JsonPart(before, text, after, place)


def _checked(grammar: OutputGrammar) -> OutputGrammar:
    objects = sum(part.schema.count("{") for part in grammar.parts)
    if objects > MAX_SCHEMA_OBJECTS:
        raise RequestError(
            400,
            f"{grammar.param}: the schemas hold {objects:,} objects; the limit is {MAX_SCHEMA_OBJECTS:,}",
            param=grammar.param,
        )
    return grammar
