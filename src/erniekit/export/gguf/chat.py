"""How a GGUF model is prompted: the chat template for llama.cpp, and an Ollama Modelfile. Called by run.py.

Ollama runs Go templates, not Jinja. Ours is found by rendering: what the template puts around a message of each role.
It is written only if it gives the Jinja template's own text for every conversation tried.
"""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from erniekit.data.compiled_template import BUILT_IN, self_contained
from erniekit.data.template import TemplateRefused, prompt_text
from erniekit.data.tokenizer import Tokenizer

MODELFILE = "Modelfile"
# llama.cpp hands a template these two, read from the ids of the file.
_GIVEN = ("bos_token", "eos_token")
_MARKER = "⟦{}⟧"  # placeholder of a message: nothing a template looks for


def create_command(folder: Path) -> str:
    return shlex.join(["ollama", "create", "my-model", "-f", str(folder / MODELFILE)])


def jinja_template(tokenizer: Tokenizer) -> str:
    names = {**tokenizer.named_tokens, "begin_token": tokenizer.begin_token, "end_token": tokenizer.end_token}
    given = {name: text for name, text in names.items() if name not in _GIVEN}
    return self_contained(tokenizer.chat_template or BUILT_IN, given)


def opens_with_bos(tokenizer: Tokenizer) -> bool:
    """Whether a prompt begins with bos: llama.cpp then adds it where a template has not written it."""
    bos = tokenizer.named_tokens.get("bos_token")
    if not bos or tokenizer.begin_token != bos:
        return False
    try:
        return prompt_text([{"role": "user", "content": "a"}], tokenizer).startswith(bos)
    except TemplateRefused:
        return False


def modelfile(file: str, tokenizer: Tokenizer, bos: bool) -> str:
    """bos: Ollama puts it before the prompt by itself, so that the template must not."""
    lines = [f"FROM ./{file}"]
    parts = _parts(tokenizer)
    if parts is None:
        lines.append("# The chat template of this model has no short Go form: add a TEMPLATE that suits your use.")
    else:
        lines.append(f'TEMPLATE """{parts.go(tokenizer.named_tokens["bos_token"] if bos else "")}"""')
    stops = dict.fromkeys((tokenizer.end_token, tokenizer.named_tokens["eos_token"]))
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Parts:
    """A template that goes message by message: the text at the start, around each role's, and before a reply."""

    first: str
    around: dict[str, tuple[str, str]]
    generation_prompt: str

    def text(self, messages: list[dict[str, str]]) -> str:
        texts = (self.around[m["role"]][0] + m["content"] + self.around[m["role"]][1] for m in messages)
        return self.first + "".join(texts) + self.generation_prompt

    def go(self, left_out: str) -> str:
        """left_out: what Ollama puts first by itself."""
        roles = [
            f'{{{{ {"else if" if n else "if"} eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}'
            for n, (role, (before, after)) in enumerate(self.around.items())
        ]
        every = "{{ range .Messages }}" + "".join(roles) + "{{ end }}{{ end }}"
        return _go(self.first.removeprefix(left_out)) + every + _go(self.generation_prompt)


def _go(text: str) -> str:
    """Text as a Go string: braces in it are no actions then, and lines stay as they are."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _parts(tokenizer: Tokenizer) -> _Parts | None:
    """None: no such form gives what the template gives."""
    tried = [
        _conversation(system + ("user", "assistant") * turns + ("user",))
        for system, turns in itertools.product(((), ("system",)), range(3))
    ]
    try:
        expected = [prompt_text(messages, tokenizer) for messages in tried]
        found = _found(expected[1], expected[3], prompt_text(tried[0], tokenizer, add_generation_prompt=False))
    except TemplateRefused:
        return None
    return found if found and all(found.text(m) == text for m, text in zip(tried, expected)) else None


def _conversation(roles: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": _MARKER.format(n)} for n, role in enumerate(roles)]


def _found(turn: str, system: str, unprompted: str) -> _Parts | None:
    """From user-assistant-user, system-user, and user without a generation prompt."""
    markers = [_MARKER.format(n) for n in range(3)]
    if not all(s in turn for s in markers) or not all(s in system for s in markers[:2]) or markers[0] not in unprompted:
        return None
    before_user, _, after_user = unprompted.partition(markers[0])
    _, _, rest = turn.partition(markers[0])
    between, _, rest = rest.partition(markers[1])
    again, _, end = rest.partition(markers[2])
    if not end.startswith(after_user) or not between.startswith(after_user):
        return None
    prompt, before_answer = end.removeprefix(after_user), between.removeprefix(after_user)
    before_system, _, rest = system.partition(markers[0])
    between, _, _ = rest.partition(markers[1])
    # `again` is what closes an answer and opens a question, `between` what closes the system text and opens one.
    # The opening is the longest end that both share and that the first message has as well.
    opens = _shared_end(_shared_end(again, between), before_user)
    first = before_user.removesuffix(opens)
    if not before_system.startswith(first):
        return None
    around = {
        "system": (before_system.removeprefix(first), between.removesuffix(opens)),
        "user": (opens, after_user),
        "assistant": (before_answer, again.removesuffix(opens)),
    }
    return _Parts(first, around, prompt)


def _shared_end(one: str, other: str) -> str:
    size = 0
    while size < min(len(one), len(other)) and one[-1 - size] == other[-1 - size]:
        size += 1
    return one[len(one) - size :]
