"""Bounds on single operations of a chat template: a limit of time looks between them, never into one. Used by
compiled_template.py.

A text can be doubled with each `~` or `+`, a number squared with each `*`, and a width of nine digits is a gigabyte:
what would become too large is refused before it is made.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_REPEATED = 2**20  # characters, or items, that `*` may make; also the largest number that may be an argument
MOST_TEXT = 2**25  # characters of any text that is put together
MOST_BITS = 4096  # of a number
_LONG_NUMBER = re.compile(r"\d{7,}")  # as a width in a format
_WIDE = re.compile(r"\d{7,}|\*")  # the same of `%`, or a width taken from its arguments


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`, through `joined` below."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # makes any amount of text, and no chat template uses it
        self.filters = {name: _bounded(name, filter) for name, filter in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _is_costly(operator, left, right):
            raise _too_large(repr(operator))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        of = getattr(__obj, "__self__", None)
        _check_call(getattr(__obj, "__name__", ""), (of, *args) if isinstance(of, str) else args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """jinja2's own wrapper of str.format hides the text, whose fields may have widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _LONG_NUMBER.search(getattr(value, "__self__", "")):
            raise _too_large("format")
        return wrapped

    @staticmethod
    def joined(parts: Iterable[Any]) -> str:
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > MOST_TEXT:
            raise _too_large("'~'")
        return "".join(texts)


def _is_costly(operator: str, left: Any, right: Any) -> bool:
    numbers = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        return numbers and (abs(left) > 2**64 or right > 64)
    if operator == "%":
        return isinstance(left, str) and _WIDE.search(left) is not None
    sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
    if operator == "+":
        return len(sizes) == 2 and sum(sizes) > MOST_TEXT
    if numbers:
        return left.bit_length() + right.bit_length() > MOST_BITS
    return any(size * side > MOST_REPEATED for size in sizes for side in (left, right) if isinstance(side, int))


def _check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """name: of a method of a text, which is the first argument, of a filter, likewise, or of anything else."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MOST_REPEATED:
            raise _too_large(f"{name}({value})")
    text = args[0] if args and isinstance(args[0], str) else ""
    size = 0
    if name in ("format", "format_map") and _LONG_NUMBER.search(text):
        raise _too_large(name)
    if name == "replace" and len(args) > 2 and isinstance(args[1], str):
        size = text.count(args[1]) * len(str(args[2]))
    elif name == "join" and len(args) > 1 and isinstance(args[1], (list, tuple)):
        size = len(text) * len(args[1]) + sum(len(part) for part in args[1] if isinstance(part, str))
    elif name == "indent":
        given = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, (int, str))]
        width = next((value for value in given if not isinstance(value, bool)), 4)
        size = (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width)
    if size > MOST_TEXT:
        raise _too_large(name)


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(filter, "jinja_pass_arg") else 0  # the context, which jinja2 passes first

    @functools.wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = args[skipped:]
        if name == "join" and given:  # `list | join(separator)`: the other way round than the method
            given = (str(given[1]) if len(given) > 1 else str(kwargs.get("d", "")), given[0])
        _check_call(name, given, kwargs)
        return filter(*args, **kwargs)

    return checked


def _too_large(what: str) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"{what} would give something too large")
