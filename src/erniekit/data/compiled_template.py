"""A chat template ready to render, and what it reads. Called by template.py; everything jinja2 of rendering is here and
in prefix_renderer.py.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from erniekit.data.prefix_renderer import instrumented
from erniekit.data.template_limit import limited
from erniekit.data.thinking import FIELDS
from erniekit.errors import CheckpointError

MOST_REPEATED = 2**20  # characters, or items, that `*` may make

# ERNIE's text form, for folders without a template of their own.
BUILT_IN = (
    "{{ begin_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + end_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """`{% generation %}` only marks the assistant's words in other trainers; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """A single operation may not go on for long either: no limit of time can look into it."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        lengths = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        if operator == "**":
            costly = isinstance(left, int) and isinstance(right, int) and (abs(left) > 2**64 or right > 64)
        else:
            times = [side for side in (left, right) if isinstance(side, int)]
            costly = any(length * number > MOST_REPEATED for length in lengths for number in times)
        if costly:
            raise jinja2.TemplateError(f"{operator!r} would give something too large")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class Compiled:
    plain: jinja2.Template
    by_message: jinja2.Template | None  # as prefix_renderer.py wants it
    knows_tools: bool
    thought_fields: tuple[str, ...]  # what it reads a message's thought as; none: it has no place for thoughts


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Compiled:
    """Same names and blank handling as in transformers."""
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        template = limited(env, env.parse(source))
        tree = env.parse(source)
        read = {node.attr for node in tree.find_all(nodes.Getattr)} | {c.value for c in tree.find_all(nodes.Const)}
        fields = tuple(name for name in FIELDS if name in read)
        tools = "tools" in meta.find_undeclared_variables(tree)
        return Compiled(template, instrumented(env, source), tools, fields)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template does not compile: {error}",
            where="chat_template in tokenizer_config.json, or chat_template.jinja",
            fix="correct the template, or remove it to use the built-in ERNIE text form",
        ) from error
