"""A chat template ready to render, and what it reads. Called by template.py; everything jinja2 of rendering is here and
in prefix_renderer.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension

from erniekit.data.prefix_renderer import instrumented
from erniekit.data.template_limit import limited
from erniekit.data.template_operations import BoundedEnvironment
from erniekit.data.thinking import FIELDS
from erniekit.errors import CheckpointError

# ERNIE's text form, for folders without a template of their own.
BUILT_IN = (
    "{{ begin_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n' }}"
    "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
    "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + end_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


def self_contained(source: str, variables: Mapping[str, str]) -> str:
    """The template with those of the variables it reads written into it, for programs that do not know them."""
    read = meta.find_undeclared_variables(_environment().parse(source))
    return "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in variables.items() if name in read) + source


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Generation(Extension):
    """`{% generation %}` only marks the assistant's text in other trainers; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True)
class Compiled:
    plain: jinja2.Template
    by_message: jinja2.Template | None  # as prefix_renderer.py needs it
    has_tools: bool
    thought_fields: tuple[str, ...]  # what it reads a message's thought as; none: it has no place for thoughts


def _environment() -> BoundedEnvironment:
    """Same names and blank handling as in transformers."""
    return BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Compiled:
    env = _environment()
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
