"""One pass through a template against a rendering of every prefix: the same text for every template, or no answer."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from erniekit.data import template
from erniekit.data.compiled_template import BUILT_IN
from erniekit.data.template import TemplateRefused, prompt_ids, turns
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import ChatMessage, Conversation

E = "<|end_of_sentence|>"
ASK = "{% if add_generation_prompt %}<mask:1>assistant\n{% endif %}"
PLAIN = f"<mask:1>{{{{ m.role }}}}\n{{{{ m.content }}}}{E}\n"
EACH, END = "{% for m in messages %}", "{% endfor %}"

# Forms of templates that render turn by turn, as those of most chat models do.
LINEAR = {
    "built_in": BUILT_IN,
    "chatml": EACH + PLAIN + END + ASK,
    "trims": "{% for m in messages %}<mask:1>{{ m.role }}\n{{ m.content | trim }}" + E + END + ASK,
    "default_system": (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% else %}be kind\n{% endif %}"
        "{% for m in messages %}{% if m.role != 'system' or not loop.first %}" + PLAIN + "{% endif %}{% endfor %}" + ASK
    ),
    "cuts_system_off": (
        "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}"
        "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
        "{{ bos_token }}{{ first }}" + EACH + PLAIN + END + ASK
    ),
    "looks_back": (
        EACH + "<mask:1>{{ m.role }}\n"
        "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' %}-{% endif %}"
        "{{ loop.previtem.role if loop.previtem is defined }}{{ m.content }}" + E + END + ASK
    ),
    "looks_ahead_at_tools_only": (
        "{% for m in messages %}{% if m.role == 'tool' and (loop.last or messages[loop.index0 + 1].role != 'tool') %}"
        "</tools>{% else %}" + PLAIN + "{% endif %}{% endfor %}" + ASK
    ),
    "filtered_loop": "{% for m in messages if m.role != 'system' %}" + PLAIN + END + ASK,
    "counts": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}" + PLAIN + "{{ ns.n }}"
        "{% endfor %}" + ASK
    ),
    "skips": EACH + "{% if m.role == 'system' %}{% continue %}{% endif %}" + PLAIN + END + ASK,
    "ernie": (
        "{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}"
        "{%- if not cls_token is defined -%}{%- set cls_token = '<mask:4>' -%}{%- endif -%}{{- cls_token -}}"
        "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{- 'User: ' + m['content'] + '\n' -}}"
        "{%- elif m['role'] == 'assistant' -%}{{- 'Assistant: ' + m['content'] + sep_token -}}"
        "{%- else -%}{{- m['content'] + '\n' -}}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
    ),
    "two_loops": "{% for t in [1, 2] %}{{ t }}{% endfor %}" + EACH + PLAIN + END + ASK,
}  # fmt: skip

# What tells how many messages there are, or goes on differently behind the loop: each prefix must be rendered.
NOT_LINEAR = {
    "last_is_special": "" + EACH + PLAIN + "{{ '!' if loop.last }}{% endfor %}" + ASK,
    "length": "{{ messages | length > 4 }}" + EACH + PLAIN + END + ASK,
    "length_in_loop": "{% for m in messages %}{{ loop.length }}" + PLAIN + END + ASK,
    "negative_index": "{{ messages[-1].role }}" + EACH + PLAIN + END + ASK,
    "reversed": "{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}" + EACH + PLAIN + END,
    "next_item": "" + EACH + PLAIN + "{{ loop.nextitem.role if loop.nextitem }}{% endfor %}" + ASK,
    "state_behind_the_loop": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}" + PLAIN +
        "{% endfor %}{% if add_generation_prompt %}{{ ns.n }}{% endif %}"
    ),
    "constant_in_the_loop": (
        EACH + PLAIN + "{% set x = 1 %}{% endfor %}{% if messages[0].role == 'user' %}{% set x = 2 %}{% endif %}"
        "{{ x if add_generation_prompt }}"
    ),
    "a_cycle": (
        "{% set c = cycler('a', 'b', 'c') %}" + EACH + PLAIN + "{{ c.next() }}" + END + "{{ c.current }}" + ASK
    ),
    "messages_again": "{% set all = messages %}" + EACH + PLAIN + END + "{{ all[0].role }}" + ASK,
    "asks_early": "{{ 'go' if add_generation_prompt }}" + EACH + PLAIN + END + ASK,
    "closes_unless_it_asks": "" + EACH + PLAIN + END + "{{ '</s>' if not add_generation_prompt }}" + ASK,
    "writes_the_list": "" + EACH + PLAIN + END + "{{ messages }}",
    "is_a_sequence": "{{ messages is sequence }}" + EACH + PLAIN + END + ASK,
    "drops_history": (
        "{% for m in messages %}{{ m.role }}{{ m.content if loop.last or m.role == 'user' }}" + E + END + ASK
    ),
    "inner_loop": EACH + "{% for n in messages %}{{ n.role[0] }}{% endfor %}" + PLAIN + END + ASK,
    "breaks_off": EACH + "{% if loop.index > 3 %}{% break %}{% endif %}" + PLAIN + END + ASK,
    "copies": "{% for m in messages + [messages[0]] %}" + PLAIN + END + ASK,
    "in_a_macro": "{% macro all() %}" + EACH + PLAIN + "{% endfor %}{% endmacro %}{{ all() }}" + ASK,
}  # fmt: skip


@pytest.fixture
def with_template(paddle: Path, tmp_path: Path):
    def make(text: str) -> Tokenizer:
        shutil.copytree(paddle / "tokenizer", tmp_path / "t", dirs_exist_ok=True)
        (tmp_path / "t" / "chat_template.jinja").write_text(text)
        return load_tokenizer(tmp_path / "t")

    return make


def random_talk(rng: random.Random, count: int) -> tuple[ChatMessage, ...]:
    words = ["river", " quiet", "\n", "  ", E, "</s>", "<mask:1>assistant\n", "山", "\ufdd0", "User: ", "}}{%", "x" * 9]
    said = [ChatMessage("system", rng.choice(words))] if rng.random() < 0.4 else []
    roles = ("user", "assistant") if rng.random() < 0.9 else ("assistant", "user")
    for i in range(count):
        text = "".join(rng.choices(words, k=rng.randrange(5)))
        said.append(ChatMessage(roles[i % 2], text, trained=rng.random() < 0.8))
    return tuple(said)


def outcome(call, *args):
    try:
        return call(*args)
    except TemplateRefused as refused:
        return str(refused)


@pytest.mark.parametrize("name", [*LINEAR, *NOT_LINEAR])
def test_one_pass_gives_what_rendering_every_prefix_gives(name: str, with_template, monkeypatch) -> None:
    tokenizer = with_template((LINEAR | NOT_LINEAR)[name])
    rng = random.Random(name)
    talks = [random_talk(rng, rng.randrange(1, 12)) for _ in range(60)]
    quick = [(outcome(turns, Conversation(t), tokenizer), outcome(prompt_ids, t, tokenizer)) for t in talks]
    monkeypatch.setattr(template._Rendering, "prefixes", lambda self: None)
    for talk, got in zip(talks, quick):
        assert got == (outcome(turns, Conversation(talk), tokenizer), outcome(prompt_ids, talk, tokenizer)), talk


@pytest.mark.parametrize(
    "name", [n if n in ("chatml", "ernie") else pytest.param(n, marks=pytest.mark.full) for n in LINEAR]
)
def test_the_work_grows_with_the_turns_not_with_their_square(name: str, with_template, monkeypatch) -> None:
    """Counted: messages handed to the template, and characters handed to the vocabulary."""
    tokenizer = with_template(LINEAR[name])
    work: Counter[str] = Counter()
    plain, encode = template._Rendering._plain, tokenizer.vocabulary.encode_many

    def counted_plain(self, message):
        work["messages"] += 1
        return plain(self, message)

    def counted_encode(runs):
        work["characters"] += sum(len(text) for text, _ in runs)
        return encode(runs)

    monkeypatch.setattr(template._Rendering, "_plain", counted_plain)
    monkeypatch.setattr(tokenizer.vocabulary, "encode_many", counted_encode)
    for ask in (lambda t: turns(Conversation(t), tokenizer), lambda t: prompt_ids(t[:-1], tokenizer)):
        done = []
        for count in (300, 3000):
            work.clear()
            ask(tuple(ChatMessage(("user", "assistant")[i % 2], f"{i:06} quiet river") for i in range(count)))
            done.append(dict(work))
        assert done[0]["messages"] > 0
        assert done[0]["characters"] > 0
        for kind, few in done[0].items():
            assert done[1][kind] <= 10.5 * few


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_template_that_looks_ahead_gets_no_answer_from_one_pass(name: str, with_template) -> None:
    tokenizer = with_template(NOT_LINEAR[name])
    talk = tuple(ChatMessage(("user", "assistant")[i % 2], "word") for i in range(6))
    assert template._Rendering(Conversation(talk), tokenizer).prefixes() is None


def test_a_long_conversation_is_not_rendered_once_for_every_prefix(with_template, monkeypatch) -> None:
    tokenizer = with_template(EACH + PLAIN + "{{ '!' if loop.last and m.role == 'tool' }}" + END + ASK)
    talk = tuple(ChatMessage(("user", "assistant")[i % 2], "word") for i in range(1025))
    rendered = []
    plain = template._Rendering._plain
    monkeypatch.setattr(template._Rendering, "_plain", lambda self, m: rendered.append(1) or plain(self, m))
    assert prompt_ids(talk[:101], tokenizer) == prompt_ids(talk[:101], tokenizer, whole=True)
    rendered.clear()
    assert prompt_ids(talk, tokenizer) == prompt_ids(talk, tokenizer, whole=True)
    assert len(rendered) < 4 * len(talk)
