"""Every prefix of a conversation from one pass through its chat template, where that is provably the same text.

Used by template.py, for training rows and for prompts: rendering each prefix by itself costs the square of the
turns.

The template's last outer loop takes its messages from a feed that notes how much is written whenever the loop takes
the next one. Rendering is deterministic: before it takes message i it has seen messages[:i] only, so what stands
there is how the rendering of messages[:i] begins. That rendering ends with what stands behind the loop, which is the
same for all of them if it reads neither messages nor anything the template assigns. Where a template looks ahead
(loop.last, a length, a negative index) no place is noted, and the caller renders that prefix by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes

from erniekit.data.template_limit import limited

_NEXT, _ENTER, _LEAVE = "__next_message", "__enter_message", "__leave_message"
# Behind the loop: what may give something else than text that depends only on the template's variables.
_IMPURE = (nodes.Call, nodes.CallBlock, nodes.Macro, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)


@dataclass(frozen=True)
class Prefixes:
    text: str  # all messages, no generation prompt
    ends: Mapping[int, int]  # the first i messages are text[:ends[i]]; only where that is proven
    generation_prompt: str  # what follows a prefix with a generation prompt


def instrumented(env: jinja2.Environment, source: str) -> jinja2.Template | None:
    """The template with its last outer loop fed message by message; None where the rest depends on that loop."""
    tree = env.parse(source)
    at = max((i for i, node in enumerate(tree.body) if isinstance(node, nodes.For)), default=-1)
    if at < 0:
        return None
    loop = tree.body[at]
    assert isinstance(loop, nodes.For)
    if loop.recursive or loop.else_ or _depends(tree, tree.body[at + 1 :]):
        return None
    assert isinstance(loop.iter, nodes.Expr)
    loop.iter = _call(_NEXT, loop.iter)
    loop.body = [nodes.ExprStmt(_call(_ENTER)), *loop.body, nodes.ExprStmt(_call(_LEAVE))]
    tree.set_lineno(1, override=False)
    return limited(env, tree)


def render_prefixes(
    template: jinja2.Template, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> Prefixes | None:
    """Two passes, with and without a generation prompt; None where one is not how the other begins."""
    text, ends, closing = _passed(template, {**variables, "add_generation_prompt": False}, messages)
    prompted, same_ends, prompt = _passed(template, {**variables, "add_generation_prompt": True}, messages)
    if text != prompted or ends != same_ends or closing:
        return None
    return Prefixes(text, ends, prompt)


def _passed(
    template: jinja2.Template, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[int, int], str]:
    """What is written up to the end of the loop, where each prefix ends in it, and what is written behind it."""
    track = _Track(len(messages))
    given = {**variables, "messages": _Feed(messages, 0, track)}
    hooks = {_NEXT: track.main_loop, _ENTER: track.enter, _LEAVE: track.leave}
    written: list[str] = []
    for chunk in template.root_render_func(template.new_context({**given, **hooks})):
        written.append(chunk)
        track.size += len(chunk)
    whole = "".join(written)
    end = track.ends.get(len(messages), 0)
    return whole[:end], track.ends, whole[end:]


def _depends(tree: nodes.Template, after: Sequence[nodes.Node]) -> bool:
    """Whether this part of the template reads `messages` or anything that may hold more than a constant, or calls
    something."""
    changing = _changing(tree)
    for node in after:
        if isinstance(node, _IMPURE) or any(True for _ in node.find_all(_IMPURE)):
            return True
        if any(name.name in changing for name in node.find_all(nodes.Name)):
            return True
    return False


def _changing(tree: nodes.Template) -> set[str]:
    """Names whose value behind the loop may depend on how many messages it was given.

    A name that is only ever set to constants, outside of loops, is not one of them: before the loop the template has
    seen none but the messages that every noted prefix has, so it has set the same. (ERNIE's own template sets
    add_generation_prompt in this way where it is not given.)
    """
    stores = Counter(name.name for name in tree.find_all(nodes.Name) if name.ctx != "load")
    in_loops = {id(assign) for loop in tree.find_all(nodes.For) for assign in loop.find_all(nodes.Assign)}
    constants = Counter(
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and isinstance(assign.node, nodes.Const) and id(assign) not in in_loops
    )
    named = {macro.name for macro in tree.find_all(nodes.Macro)} | {ref.name for ref in tree.find_all(nodes.NSRef)}
    return {name for name, count in stores.items() if count > constants[name]} | named | {"messages"}


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)


class _Track:
    """What the template has read of its messages, and where it stood when its loop took each of them."""

    def __init__(self, count: int) -> None:
        self.count, self.size = count, 0
        self.ends: dict[int, int] = {}
        self._known = 0  # messages before this one have been read
        self._inside = self._looped = False

    def enter(self) -> None:
        self._inside = True

    def leave(self) -> None:
        self._inside = False

    def look(self, index: int) -> None:
        """Message `index` is read out of turn: with fewer messages the template may go another way from here."""
        self._known = max(self._known, index + 1)

    def look_at_all(self) -> None:
        self._known = sys.maxsize

    def main_loop(self, messages: Any) -> Iterator[Any]:
        if not isinstance(messages, _Feed) or self._looped:
            self.look_at_all()
            return iter(messages)
        self._looped = True
        return self._in_turn(messages)

    def _in_turn(self, messages: _Feed) -> Iterator[Any]:
        for index in range(messages._first, self.count + 1):
            if index == self._known and not self._inside:  # not while a body looks ahead through `loop`
                self.ends[index] = self.size
            self.look(index)
            if index < self.count:
                yield messages._messages[index]


class _Feed:
    """`messages` as a template sees it. Anything that would show how many there are is noted as a look at all."""

    __slots__ = ("_first", "_messages", "_track")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, messages: Sequence[Mapping[str, Any]], first: int, track: _Track) -> None:
        self._messages, self._first, self._track = messages, first, track

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._slice(key)
        if not isinstance(key, int) or key < 0:
            self._track.look_at_all()
            return list(self._messages[self._first :])[key]
        self._track.look(self._first + key)
        return self._messages[self._first + key]

    def _slice(self, key: slice) -> Any:
        start = key.start or 0
        if not isinstance(start, int) or start < 0 or key.stop is not None or key.step not in (None, 1):
            self._track.look_at_all()
            return list(self._messages[self._first :])[key]
        return _Feed(self._messages, self._first + start, self._track)

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._first, len(self._messages) + 1):
            self._track.look(index)
            if index < len(self._messages):
                yield self._messages[index]

    def __bool__(self) -> bool:
        self._track.look(self._first)
        return self._first < len(self._messages)

    def __len__(self) -> int:
        self._track.look_at_all()
        return max(0, len(self._messages) - self._first)

    def __eq__(self, other: object) -> bool:
        self._track.look_at_all()
        return list(self._messages[self._first :]) == other

    def __repr__(self) -> str:
        self._track.look_at_all()
        return repr(list(self._messages[self._first :]))

    def __getattr__(self, name: str) -> NoReturn:  # a list's methods
        self._track.look_at_all()
        raise AttributeError(name)
