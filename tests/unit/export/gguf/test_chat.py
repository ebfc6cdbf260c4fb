"""The chat template inside the file, and the Modelfile beside it: both give what our own template gives."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jinja2
import pytest

from erniekit.data.template import prompt_text
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.export.gguf.chat import jinja_template, modelfile, opens_with_bos
from support.small_tokenizers import make

CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# What stands before a message depends on its place, which no form that goes by role gives.
NUMBERED = "{%- for m in messages -%}{{- loop.index ~ ': ' ~ m.content -}}{%- endfor -%}"
TALKS = [
    [("user", "Who are you?")],
    [("system", 'Say "no" {{ never }}.'), ("user", "Why?\n"), ("assistant", "No."), ("user", " ok ")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
]


def with_template(tiny: Path, folder: Path, template: str, **settings: object) -> Tokenizer:
    folder.mkdir()
    for name in ("tokenizer.model", "special_tokens_map.json", "config.json"):
        shutil.copyfile(tiny / name, folder / name)
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template, **settings}))
    return load_tokenizer(folder)


def messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def go(template: str, talk: list[tuple[str, str]]) -> str:
    """Go's text/template, as much of it as we write: strings, one range over messages, if and else if by role."""
    actions = r'\{\{ (?:("(?:[^"\\]|\\.)*")|(\.Content)|(range \.Messages)|((?:else )?if) eq \.Role "(\w+)"|(end)) \}\}'
    assert not re.sub(actions, "", template), "nothing else is written"

    def run(steps: list[re.Match[str]], message: dict[str, str]) -> str:
        out, speaks = "", True
        for step in steps:
            text, content, _, branch, role, end = step.groups()
            if branch:
                speaks = message["role"] == role
            elif end:
                speaks = True
            elif speaks:
                out += json.loads(text) if text else message["content"] if content else ""
        return out

    steps = list(re.finditer(actions, template))
    start = next(n for n, step in enumerate(steps) if step[3])
    stop = max(n for n, step in enumerate(steps) if step[6])
    inner = "".join(run(steps[start + 1 : stop], message) for message in messages(talk))
    return run(steps[:start], {}) + inner + run(steps[stop + 1 :], {})


def template_of(text: str) -> str:
    found = re.search(r'^TEMPLATE """(.*?)"""$', text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize("template", ["own", CHATML], ids=["ernie", "chatml"])
@pytest.mark.parametrize("talk", TALKS)
def test_ollamas_template_writes_what_ours_writes(tiny, tmp_path, template, talk):
    folder = tiny["ernie4_5"]
    tokenizer = load_tokenizer(folder) if template == "own" else with_template(folder, tmp_path / "t", template)
    text = modelfile("model-Q8_0.gguf", tokenizer, False)
    assert text.startswith("FROM ./model-Q8_0.gguf\n")
    assert go(template_of(text), talk) == prompt_text(messages(talk), tokenizer)


def test_a_bos_that_ollama_adds_is_not_in_its_template_as_well(tiny, paddle, tmp_path):
    make("byte level", paddle, tmp_path)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}" + CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert opens_with_bos(tokenizer)
    written = template_of(modelfile("m.gguf", tokenizer, True))
    assert "<s>" + go(written, TALKS[1]) == prompt_text(messages(TALKS[1]), tokenizer)
    assert not opens_with_bos(load_tokenizer(tiny["ernie4_5"]))


def test_a_template_without_such_a_form_is_left_out_and_said_so(tiny, tmp_path):
    tokenizer = with_template(tiny["ernie4_5"], tmp_path / "t", NUMBERED)
    text = modelfile("m.gguf", tokenizer, False)
    assert "TEMPLATE" not in re.sub("#.*", "", text)
    assert "# The chat template of this model has no short Go form" in text
    assert 'PARAMETER stop "<|end_of_sentence|>"' in text


def test_tokens_that_llama_cpp_does_not_hand_over_are_written_into_the_template(tiny, tmp_path):
    template = "{{ cls_token }}{% for m in messages %}{{ m.content + sep_token + eos_token }}{% endfor %}"
    tokenizer = with_template(tiny["ernie4_5"], tmp_path / "t", template)
    asked = {"messages": messages(TALKS[1]), "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    got = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(jinja_template(tokenizer)).render(asked)
    assert got == prompt_text(messages(TALKS[1]), tokenizer)
    own = load_tokenizer(tiny["ernie4_5"])
    assert jinja_template(own) == own.chat_template, "a template that needs nothing stays as it is"
