"""Render conversations with the model's own chat template and cut them into turns of token ids.

Called by assemble.py (training), by chat and the server (`prompt_ids`), and by recipes/served_prompts.py, which
compares the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from erniekit.data.compiled_template import BUILT_IN, compiled, to_json
from erniekit.data.prefix_renderer import Prefixes, render_prefixes
from erniekit.data.template_limit import TookTooLong, deadline
from erniekit.data.thinking import thought_tokens, write_out
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage, Conversation
from erniekit.errors import DataError

# Unicode noncharacters: no text has them, so one can mark a place inside a string.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))

Parts = list[tuple[str, str]]  # query and answer of each turn
# Messages that may be rendered for one prompt when each of its prefixes is rendered by itself: the square of its turns.
MOST_RENDERED = 65_536


@dataclass(frozen=True)
class Turn:
    """Ids are encoded per part: `query_ids` runs through the generation prompt, `answer_ids` through its end token."""

    query_ids: list[int]
    answer_ids: list[int]
    trained: bool
    thought: int = 0  # how many of the answer's ids are reasoning


class TemplateRefused(ValueError):
    """The chat template does not take this conversation; the text gives the reason."""


class PromptTooLong(ValueError):
    """The prompt has more tokens than were allowed: at least `tokens`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class RenderedTooLong(DataError):
    """The chat template did not end in the time it has (template_limit.py)."""


class ThoughtRefused(TemplateRefused):
    """The chat template leaves out an answer's reasoning."""


def turns(conversation: Conversation, tokenizer: Tokenizer) -> list[Turn]:
    """One turn per assistant message, oldest first.

    Conversations with tools, and templates that rewrite earlier turns, give one turn instead: everything before the
    last trained answer is its query, exactly what a server would send.
    """
    ready = _Rendering(conversation, tokenizer, variables_for(conversation))
    messages = ready.messages
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    parts = None if uses_tools(conversation) else _cut(ready)
    if parts is None:
        last = max((i for i in answers if messages[i].trained), default=max(answers, default=-1))
        parts, answers = [_cut_last(ready, messages[: last + 1])], [last]
    for (_, text), i in zip(parts, answers):
        if messages[i].trained and messages[i].thought.strip() not in text:
            raise ThoughtRefused(
                "the chat template leaves out the answer's reasoning; `train_thinking: drop` trains only the answer"
            )
    ids = list(_encode([text for part in parts for text in part], tokenizer, ready.mark))
    out = []
    for (query, text), query_ids, answer_ids, i in zip(parts, ids[::2], ids[1::2], answers):
        out.append(Turn(query_ids, answer_ids, messages[i].trained, thought_tokens(query, text, answer_ids, tokenizer)))
    return out


def variables_for(conversation: Conversation) -> dict[str, Any]:
    """The template variables a server needs for such answers: reasoning is enabled by name."""
    return {"enable_thinking": True} if any(m.thought and m.trained for m in conversation.messages) else {}


def prompt_ids(
    messages: Sequence[ChatMessage | Mapping[str, Any]],
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] | None = None,
    whole: bool = False,
    variables: Mapping[str, Any] | None = None,
    most: int | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids to generate from: equal to the training prefix, token for token. variables: what else the template reads.
    add_generation_prompt: an answer is to follow; else only the messages, as one string.

    `whole` encodes the rendering as one string, as servers that know only the template do. The two differ where an
    earlier answer merges with the space of `Assistant: ` in front of it. It is also done where a template must render
    every prefix by itself and that would be more than MOST_RENDERED messages. A prompt of more than `most` tokens is
    PromptTooLong, mostly before all of it is encoded.
    """
    conversation = Conversation(tuple(map(_message, messages)), tuple(tools or ()))
    ready = _Rendering(conversation, tokenizer, variables)
    parts = (
        None
        if whole or not add_generation_prompt or uses_tools(conversation)
        else _cut(ready, add_generation_prompt=True)
    )
    texts = (
        [ready.render(ready.messages, add_generation_prompt)]
        if parts is None
        else [text for part in parts for text in part]
    )
    if most is not None:
        least = tokenizer.least_tokens(sum(len(text) - text.count(ready.mark) for text in texts))
        if least > most:
            raise PromptTooLong(least)
    out: list[int] = []
    for ids in _encode(texts, tokenizer, ready.mark):
        out += ids
        if most is not None and len(out) > most:
            raise PromptTooLong(len(out))
    return out


def prompt_text(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """What the template writes for them; add_generation_prompt: and for the answer to begin."""
    ready = _Rendering(Conversation(tuple(map(_message, messages)), tuple(tools or ())), tokenizer, variables)
    return ready.render(ready.messages, add_generation_prompt).replace(ready.mark, "")


def least_tokens(conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
    """How many tokens the first 0, 1, 2 ... messages have at least; nothing where only rendering each of them shows it.

    Exact up to the last control token: text behind it may merge with what comes next.
    """
    ready = _Rendering(conversation, tokenizer)
    found = ready.prefixes()
    if found is None:
        return []
    bounds, counts, ids = [0], [0], list[int]()
    for control in tokenizer.special_pattern.finditer(found.text):
        part = found.text[bounds[-1] : control.end()]
        ids = tokenizer.encode_rendered(_spans(part, tokenizer, ready.mark), ids[-1:])
        bounds.append(control.end())
        counts.append(counts[-1] + len(ids))
    ends = (found.ends.get(place, 0) for place in ready.places)
    return [counts[bisect_right(bounds, end) - 1] for end in ends]


def _cut(ready: _Rendering, add_generation_prompt: bool = False) -> Parts | None:
    """(query, answer) strings by difference of successive renderings; None if one does not extend the other."""
    messages, controls = ready.messages, tuple(ready.tokenizer.special_ids)
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    found = ready.prefixes() if len(answers) > 1 else None
    if found is not None and all(i in found.ends and i + 1 in found.ends for i in answers):
        return _cut_prefixes(found, answers, controls, add_generation_prompt)
    if add_generation_prompt and 2 * sum(answers) > MOST_RENDERED:
        return None
    out: Parts = []
    done = ""
    for i in answers:
        query, answer = ready.render(messages[:i], True), ready.render(messages[: i + 1], False)
        if not query.startswith(done) or not answer.startswith(query):
            return None
        answer = answer[: _end_of_answer(answer, len(answer), controls)]
        out.append((query[len(done) :], answer[len(query) :]))
        done = answer
    if add_generation_prompt:
        query = ready.render(messages, True)
        if not query.startswith(done):
            return None
        out.append((query[len(done) :], ""))
    return out


def _cut_prefixes(
    found: Prefixes, answers: Sequence[int], controls: tuple[str, ...], add_generation_prompt: bool
) -> Parts | None:
    """As the loop of `_cut`, with every rendering a prefix of one text."""
    out: Parts = []
    text, prompt, done = found.text, found.generation_prompt, 0
    for i in answers:
        begin, end = found.ends[i], found.ends[i + 1]
        answer_at = begin + len(prompt)
        if answer_at > end or not text.startswith(prompt, begin):
            return None
        end = _end_of_answer(text, end, controls)
        out.append((text[done:answer_at], text[answer_at:end]))
        done = end
    if add_generation_prompt:
        out.append((text[done:] + prompt, ""))
    return out


def _cut_last(ready: _Rendering, messages: Sequence[ChatMessage]) -> tuple[str, str]:
    if not messages:
        raise TemplateRefused("the conversation has no assistant message")
    query, answer = ready.render(messages[:-1], True), ready.render(messages, False)
    if not answer.startswith(query):
        raise TemplateRefused(
            "the chat template renders an answer differently from the prompt it generates from, "
            "so training would differ from what a server generates from"
        )
    return query, answer[len(query) : _end_of_answer(answer, len(answer), tuple(ready.tokenizer.special_ids))]


def _end_of_answer(rendered: str, end: int, controls: tuple[str, ...]) -> int:
    """Just behind the end token of rendered[:end]; blanks after it belong to the next query."""
    bare = end
    while bare and rendered[bare - 1].isspace():
        bare -= 1
    return bare if rendered.endswith(controls, 0, bare) else end


def _encode(texts: Sequence[str], tokenizer: Tokenizer, mark: str) -> Iterator[list[int]]:
    return tokenizer.encode_parts(_spans(text, tokenizer, mark) for text in texts)


def _spans(text: str, tokenizer: Tokenizer, mark: str) -> Iterator[tuple[str, bool]]:
    """Control strings the template wrote, and everything else with its marks taken out."""
    at = 0
    for control in tokenizer.special_pattern.finditer(text):
        yield text[at : control.start()].replace(mark, ""), False
        yield control.group(), True
        at = control.end()
    yield text[at:].replace(mark, ""), False


class _Rendering:
    """Messages ready for the template, the template, and the mark.

    A control string in content gets a mark behind its first character. Whatever the template then does with the
    content (strip, split, quote), the string can no longer pass for one the template wrote.
    """

    def __init__(self, conversation: Conversation, tokenizer: Tokenizer, more: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        messages, tools = conversation.messages, conversation.tools
        named = tokenizer.tool_template if tools and tokenizer.tool_template else tokenizer.chat_template
        self._template = compiled(named or BUILT_IN)
        if not self._template.thought_fields:
            messages = tuple(map(write_out, messages))
        self.places: Sequence[int] = range(len(messages) + 1)  # how many of `messages` the first i given ones became
        if not self._template.has_tools:
            self.places = _places(messages, tools)
            messages, tools = _write_out_tools(messages, tools), ()
        self.mark = _unused_mark(messages, (*tools, dict(more)) if more else tools)
        self.messages = tuple(map(self._shielded, messages))
        self._variables = {
            **self._shield(more or {}),
            **tokenizer.named_tokens,
            "begin_token": tokenizer.begin_token,
            "end_token": tokenizer.end_token,
            "tools": self._shield(list(tools)) or None,
            "documents": None,
        }

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        plain = [self._plain(message) for message in messages]
        try:
            with deadline():
                return self._template.plain.render(
                    {**self._variables, "messages": plain, "add_generation_prompt": add_generation_prompt}
                )
        except TookTooLong:
            raise self._too_long() from None
        except Exception as error:  # a template is a program from the model's folder: anything may come out of it
            raise TemplateRefused(f"the chat template refuses it: {error}") from error

    def prefixes(self) -> Prefixes | None:
        """None where only a rendering of each prefix can show it."""
        if self._template.by_message is None:
            return None
        try:
            with deadline():
                plain = list(map(self._plain, self.messages))
                return render_prefixes(self._template.by_message, self._variables, plain)
        except TookTooLong:
            raise self._too_long() from None
        except Exception:  # `render` reports what is wrong with it
            return None

    def _too_long(self) -> DataError:
        return RenderedTooLong(
            f"the chat template was still rendering at its limit of time, for {len(self.messages)} messages",
            where=f"{self.tokenizer.folder}: chat_template in tokenizer_config.json, or chat_template.jinja",
            fix="correct its loops, or remove it to use the built-in ERNIE text form",
        )

    def _plain(self, message: ChatMessage) -> dict[str, Any]:
        out: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            out["tool_calls"] = list(message.tool_calls)
        return out | dict.fromkeys(self._template.thought_fields, message.thought) if message.thought else out

    def _shielded(self, message: ChatMessage) -> ChatMessage:
        find = self.tokenizer.special_pattern.search
        if not message.tool_calls and not find(message.content) and not find(message.thought):
            return message
        return replace(
            message,
            content=self._shield(message.content),
            tool_calls=tuple(self._shield(message.tool_calls)),
            thought=self._shield(message.thought),
        )

    def _shield(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mark.join(self.tokenizer.cut_specials(value))
        if isinstance(value, Mapping):
            return {self._shield(key): self._shield(item) for key, item in value.items()}
        return [self._shield(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unused_mark(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
    text = "".join(m.content + m.thought for m in messages) + (
        str([m.tool_calls for m in messages]) + str(tools) if tools or any(m.tool_calls for m in messages) else ""
    )
    for mark in _MARKS:
        if mark not in text:
            return mark
    raise TemplateRefused("the text uses all 32 Unicode noncharacters U+FDD0..U+FDEF")


def _message(given: ChatMessage | Mapping[str, Any]) -> ChatMessage:
    if isinstance(given, ChatMessage):
        return given
    return ChatMessage(given["role"], given.get("content") or "", tool_calls=tuple(given.get("tool_calls") or ()))


def uses_tools(conversation: Conversation) -> bool:
    return bool(conversation.tools) or any(m.role == "tool" or m.tool_calls for m in conversation.messages)


def _write_out_tools(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """For templates that know no tools: the list in the system text, calls and results between tags."""
    out: list[ChatMessage] = []
    for message in messages:
        if message.tool_calls:
            calls = [f"<tool_call>\n{to_json(call.get('function', call))}\n</tool_call>" for call in message.tool_calls]
            text = "\n".join([message.content, *calls] if message.content else calls)
            out.append(replace(message, content=text, tool_calls=()))
        elif message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if out and out[-1].role == "user" and out[-1].content.endswith("</tool_response>"):
                out[-1] = replace(out[-1], content=out[-1].content + "\n" + text)
            else:
                out.append(ChatMessage("user", text))
        else:
            out.append(message)
    if tools:
        listed = "\n".join(map(to_json, tools))
        block = (
            f"You may call these tools:\n<tools>\n{listed}\n</tools>\n"
            'Call one as <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        )
        if out and out[0].role == "system":
            out[0] = replace(out[0], content=f"{out[0].content}\n{block}")
        else:
            out.insert(0, ChatMessage("system", block))
    return tuple(out)


def _places(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[int]:
    """How many messages `_write_out_tools` makes of the first 0, 1, 2 ... of them: results in a row become one."""
    more = bool(tools) and not (messages and messages[0].role == "system")
    lengths = (
        not (message.role == "tool" and before is not None and before.role == "tool")
        for before, message in zip((None, *messages), messages)
    )
    return list(accumulate(lengths, initial=int(more)))
