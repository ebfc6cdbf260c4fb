"""Render conversations with the model's own chat template and cut them into turns of token ids.

Called by assemble.py (training), by chat and the server (`prompt_ids`), and by doctor, which compares the two.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from erniekit.data.template_limit import RENDER_S, TookTooLong, deadline, limited
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Conversation, Message
from erniekit.errors import CheckpointError, DataError

# ERNIE's text form, for folders without a template of their own.
BUILT_IN = (
    "{{ begin_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + end_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
# Unicode noncharacters: no text has them, so one can mark a place inside a string.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))

Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True)
class Turn:
    """Ids are encoded per part: `query_ids` runs through the generation prompt, `answer_ids` through its end token."""

    query_ids: list[int]
    answer_ids: list[int]
    trained: bool


class TemplateRefused(ValueError):
    """The chat template does not take this conversation; the text says why."""


def turns(conversation: Conversation, tokenizer: Tokenizer) -> list[Turn]:
    """One turn per assistant message, oldest first.

    Conversations with tools, and templates that rewrite earlier turns, give one turn instead: everything before the
    last trained answer is its query, exactly what a server would send.
    """
    messages, render, mark = _prepare(conversation.messages, conversation.tools, tokenizer)
    answers = [message for message in messages if message.role == "assistant"]
    parts = None if _uses_tools(conversation) else _cut(messages, render, tokenizer)
    if parts is None:
        last = max((i for i, m in enumerate(messages) if m.role == "assistant" and m.trained), default=-1)
        if last < 0:
            last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=-1)
        parts, answers = [_cut_last(messages[: last + 1], render, tokenizer)], [messages[last]]
    ids = _encode([text for part in parts for text in part], tokenizer, mark)
    return [Turn(ids[2 * i], ids[2 * i + 1], answer.trained) for i, answer in enumerate(answers)]


def prompt_ids(
    messages: Sequence[Message | Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] | None = None,
    whole: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids to generate from: equal to the training prefix, token for token. variables: what else the template reads.

    `whole` encodes the rendering as one string, as servers that know only the template do. The two differ where an
    earlier answer merges with the space of `Assistant: ` in front of it.
    """
    asked = Conversation(tuple(map(_message, messages)), tuple(tools or ()))
    ready, render, mark = _prepare(asked.messages, asked.tools, tokenizer, variables)
    parts = None if whole or _uses_tools(asked) else _cut(ready, render, tokenizer, ask=True)
    texts = [render(ready, True)] if parts is None else [text for part in parts for text in part]
    return [id for ids in _encode(texts, tokenizer, mark) for id in ids]


def keeps_history(tokenizer: Tokenizer) -> bool:
    """Whether an earlier turn is rendered as when it was new; if not, only the last trained answer can be trained."""
    said = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
    messages, render, _ = _prepare(said, (), tokenizer)
    try:
        return _cut(messages, render, tokenizer) is not None
    except TemplateRefused:
        return False


def _cut(
    messages: Sequence[Message], render: Render, tokenizer: Tokenizer, ask: bool = False
) -> list[tuple[str, str]] | None:
    """(query, answer) strings by difference of successive renderings; None if one does not extend the other."""
    out: list[tuple[str, str]] = []
    done = ""
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        query, answer = render(messages[:i], True), render(messages[: i + 1], False)
        if not query.startswith(done) or not answer.startswith(query):
            return None
        answer = answer[: _end_of_answer(answer, tokenizer)]
        out.append((query[len(done) :], answer[len(query) :]))
        done = answer
    if ask:
        query = render(messages, True)
        if not query.startswith(done):
            return None
        out.append((query[len(done) :], ""))
    return out


def _cut_last(messages: Sequence[Message], render: Render, tokenizer: Tokenizer) -> tuple[str, str]:
    if not messages:
        raise TemplateRefused("the conversation has no assistant message")
    query, answer = render(messages[:-1], True), render(messages, False)
    if not answer.startswith(query):
        raise TemplateRefused(
            "the chat template renders an answer differently from the prompt it generates from, "
            "so what is trained would not be what a server asks for"
        )
    return query, answer[len(query) : _end_of_answer(answer, tokenizer)]


def _end_of_answer(rendered: str, tokenizer: Tokenizer) -> int:
    """Just behind the end token; blanks after it belong to the next query."""
    end = len(rendered.rstrip())
    return end if rendered.endswith(tuple(tokenizer.special_ids), 0, end) else len(rendered)


def _encode(texts: Sequence[str], tokenizer: Tokenizer, mark: str) -> list[list[int]]:
    out: list[list[int]] = []
    before: list[int] = []
    for text in texts:
        ids = tokenizer.encode_rendered(_spans(text, tokenizer, mark), before)
        out.append(ids)
        before = ids or before
    return out


def _spans(text: str, tokenizer: Tokenizer, mark: str) -> Iterator[tuple[str, bool]]:
    """Control strings the template wrote, and everything else with its marks taken out."""
    at = 0
    for control in tokenizer.special_pattern.finditer(text):
        yield text[at : control.start()].replace(mark, ""), False
        yield control.group(), True
        at = control.end()
    yield text[at:].replace(mark, ""), False


def _prepare(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    more: Mapping[str, Any] | None = None,
) -> tuple[tuple[Message, ...], Render, str]:
    """Messages ready for the template, the template, and the mark.

    A control string in content gets a mark behind its first character. Whatever the template then does with the
    content (strip, split, quote), the string can no longer pass for one the template wrote.
    """
    named = tokenizer.tool_template if tools and tokenizer.tool_template else tokenizer.chat_template
    source = named or BUILT_IN
    template, knows_tools = _compile(source)
    if not knows_tools:
        messages, tools = _write_out_tools(messages, tools), ()
    mark = _unused_mark(messages, (*tools, dict(more)) if more else tools)

    def shield(value: Any) -> Any:
        if isinstance(value, str):
            at = 0
            while found := tokenizer.special_pattern.search(value, at):
                at = found.start() + 2
                value = value[: at - 1] + mark + value[at - 1 :]
            return value
        if isinstance(value, Mapping):
            return {shield(key): shield(item) for key, item in value.items()}
        return [shield(item) for item in value] if isinstance(value, (list, tuple)) else value

    def ready_for(message: Message) -> Message:
        if not message.tool_calls and not tokenizer.special_pattern.search(message.content):
            return message
        return replace(message, content=shield(message.content), tool_calls=tuple(shield(message.tool_calls)))

    ready = tuple(map(ready_for, messages))
    variables = {
        **shield(more or {}),
        **tokenizer.named_tokens,
        "begin_token": tokenizer.begin_token,
        "end_token": tokenizer.end_token,
        "tools": shield(list(tools)) or None,
        "documents": None,
    }

    def render(said: Sequence[Message], ask: bool) -> str:
        plain = [
            {"role": m.role, "content": m.content, **({"tool_calls": list(m.tool_calls)} if m.tool_calls else {})}
            for m in said
        ]
        try:
            with deadline():
                return template.render(**{**variables, "messages": plain, "add_generation_prompt": ask})
        except TookTooLong:
            raise DataError(
                f"the chat template was still rendering after {RENDER_S:.0f} s, for {len(plain)} messages",
                where=f"{tokenizer.folder}: chat_template in tokenizer_config.json, or chat_template.jinja",
                fix="correct its loops, or remove it to use the built-in ERNIE text form",
            ) from None
        except Exception as error:  # a template is a program from the model's folder: anything may come out of it
            raise TemplateRefused(f"the chat template refuses it: {error}") from error

    return ready, render, mark


def _unused_mark(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    text = "".join(m.content for m in messages) + (
        str([m.tool_calls for m in messages]) + str(tools) if tools or any(m.tool_calls for m in messages) else ""
    )
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise TemplateRefused("the text uses all 32 Unicode noncharacters U+FDD0..U+FDEF")


def _message(given: Message | Mapping[str, Any]) -> Message:
    if isinstance(given, Message):
        return given
    return Message(given["role"], given.get("content") or "", tool_calls=tuple(given.get("tool_calls") or ()))


def _uses_tools(conversation: Conversation) -> bool:
    return bool(conversation.tools) or any(m.role == "tool" or m.tool_calls for m in conversation.messages)


def _write_out_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """For templates that know no tools: the list in the system text, calls and results between tags."""
    out: list[Message] = []
    for message in messages:
        if message.tool_calls:
            calls = [f"<tool_call>\n{_json(call.get('function', call))}\n</tool_call>" for call in message.tool_calls]
            text = "\n".join([message.content, *calls] if message.content else calls)
            out.append(replace(message, content=text, tool_calls=()))
        elif message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if out and out[-1].role == "user" and out[-1].content.endswith("</tool_response>"):
                out[-1] = replace(out[-1], content=out[-1].content + "\n" + text)
            else:
                out.append(Message("user", text))
        else:
            out.append(message)
    if tools:
        listed = "\n".join(map(_json, tools))
        block = (
            f"You may call these tools:\n<tools>\n{listed}\n</tools>\n"
            'Call one as <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        )
        if out and out[0].role == "system":
            out[0] = replace(out[0], content=f"{out[0].content}\n{block}")
        else:
            out.insert(0, Message("system", block))
    return tuple(out)


def _json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """`{% generation %}` only marks the assistant's words in other trainers; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, bool]:
    """The template and whether it speaks of tools. Same names and blank handling as in transformers."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = limited(env, source)
        # A render copies its globals; jinja2's ChainMap of them makes that copy half of the cost of a short row.
        template.globals = dict(template.globals)
        return template, "tools" in meta.find_undeclared_variables(env.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template does not compile: {error}",
            where="chat_template in tokenizer_config.json, or chat_template.jinja",
            fix="correct the template, or remove it to use the built-in ERNIE text form",
        ) from error
