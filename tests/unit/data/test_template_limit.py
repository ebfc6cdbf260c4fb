"""A chat template that loops ends with an error that names it, and one that does not renders as ever."""

from __future__ import annotations

import time
from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from erniekit.data import template, template_limit
from erniekit.data.template_limit import TookTooLong, deadline, limited
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import ChatMessage
from erniekit.errors import DataError

ENV = dict(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}x{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in [1] * 999 recursive %}{{ loop([1] * 999) if loop.depth < 4 }}{% endfor %}",
]


def compiled(source: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(**ENV)
    return limited(env, env.parse(source))


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_loops_ends_at_its_deadline(source: str) -> None:
    made = compiled(source)
    began = time.thread_time()
    with pytest.raises(TookTooLong), deadline(0.2):
        made.render()
    assert time.thread_time() - began < 5


def test_what_a_template_renders_is_not_changed() -> None:
    source = (
        "{% macro m(x) %}[{{ x }}]{% endmacro %}\n{% macro c() %}<{{ caller() }}>{% endmacro %}\n"
        "{% for a in 'abc' %}\n  {{ loop.index }}/{{ loop.length }} {{ m(a) }}{% if loop.last %}.{% endif %}"
        "\n{% if a == 'b' %}{% continue %}{% endif %}\n{{ loop.previtem }}{% else %}none{% endfor %}\n"
        "{% call c() %}y{% endcall %}{% for a in [] %}{% else %}empty{% endfor %}"
    )
    plain = ImmutableSandboxedEnvironment(**ENV).from_string(source).render()
    assert compiled(source).render() == plain
    with pytest.raises(jinja2.TemplateSyntaxError):
        compiled("{% for %}")


def test_the_error_names_the_template_and_is_no_bad_row(paddle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    monkeypatch.setattr(tokenizer, "chat_template", LOOPS[0])
    monkeypatch.setattr(template_limit, "RENDER_S", 0.2)
    with pytest.raises(DataError, match="chat template was still rendering at its limit of time") as caught:
        template.prompt_ids([ChatMessage("user", "hello")], tokenizer)
    assert str(tokenizer.folder) in caught.value.where


def test_a_deadline_around_others_holds_for_all_of_them() -> None:
    made = compiled("{% for a in range(99999) %}{% set c = a %}{% endfor %}")
    began = time.thread_time()

    def one_after_another() -> None:
        while time.thread_time() - began < 5:
            with deadline(30):
                made.render()

    with pytest.raises(TookTooLong), deadline(0.2):
        one_after_another()
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("source", ["{{ 10 ** 100000000 }}", "{{ 'ab' * 10 ** 9 }}", "{{ 10 ** 9 * [messages] }}"])
def test_one_operation_cannot_take_long_either(source: str, paddle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    monkeypatch.setattr(tokenizer, "chat_template", source)
    with pytest.raises(template.TemplateRefused, match="too large"):
        template.prompt_ids([ChatMessage("user", "hello")], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ '=' * 20 }}{{ 2 ** 10 }}{{ 3 * 1.5 }}{{ [1, 2] * 2 }}")
    ids = template.prompt_ids([ChatMessage("user", "hello")], tokenizer)
    assert tokenizer.decode(ids) == "=" * 20 + "10244.5[1, 2, 1, 2]"
