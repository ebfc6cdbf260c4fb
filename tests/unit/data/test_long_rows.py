"""Long rows of the chatml format: the examples that fit are those of rendering every one, at work linear in the row."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from erniekit.data import long_rows, template
from erniekit.data.tokenise import TokeniseJob, tokenise_rows
from erniekit.data.tokenizer import Tokenizer, load_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "</s>"}}}
END = "<|end_of_sentence|>"
KNOWS_TOOLS = (
    "{{ tools | tojson if tools }}{% for m in messages %}<mask:1>{{ m.role }} {{ m.content }}"
    "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<mask:1>assistant {% endif %}"
)
LOOKS_AHEAD = KNOWS_TOOLS.replace("{% endfor %}", "{{ '!' if loop.last }}{% endfor %}")


@pytest.fixture(params=["written out", "known", "looks ahead"])
def tokenizer(request: pytest.FixtureRequest, paddle: Path, tmp_path: Path) -> Tokenizer:
    shutil.copytree(paddle / "tokenizer", tmp_path / "t")
    if request.param != "written out":
        text = KNOWS_TOOLS if request.param == "known" else LOOKS_AHEAD
        (tmp_path / "t" / "chat_template.jinja").write_text(text)
    return load_tokenizer(tmp_path / "t")


ROUNDS = 20  # every prefix is rendered to compare with: the work of that grows with the square


def row(rounds: int, kind: str = "tools") -> bytes:
    """late: without a list of tools, and the first call comes after ten rounds."""
    said: list[dict] = [{"role": "system", "content": "the quiet river"}] if kind == "system" else []
    for i in range(rounds):
        said.append({"role": "user", "content": f"{i:05} harbor"})
        if kind != "plain" and (i > 9 or kind != "late"):
            said.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
            said += [{"role": "tool", "content": f"copper {END}"}] * (1 + i % 2)
        said.append({"role": "assistant", "content": "the lantern", "weight": int(i % 5 > 0)})
    return json.dumps({"messages": said} | ({} if kind in ("plain", "late") else {"tools": TOOLS})).encode()


@pytest.mark.parametrize(
    "kind", ["tools", "late", *(pytest.param(k, marks=pytest.mark.full) for k in ("system", "plain"))]
)
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_the_examples_that_fit_are_those_of_rendering_every_one(
    tokenizer: Tokenizer, overlong: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (64, 200, 700):
        job = TokeniseJob("f", "chatml", tokenizer, length, overlong, False)
        quick = tokenise_rows([(1, row(ROUNDS, kind))], job)
        with monkeypatch.context() as patched:
            patched.setattr(long_rows, "LONG_ROW", 10**9)
            slow = tokenise_rows([(1, row(ROUNDS, kind))], job)
        assert quick.main.ids.tolist() == slow.main.ids.tolist()
        assert quick.main.labels.tolist() == slow.main.labels.tolist()
        assert Counter(kind for _, kind, _ in quick.dropped) == Counter(kind for _, kind, _ in slow.dropped)
        assert (quick.sums, quick.bad, slow.bad) == (slow.sums, [], [])
        assert len(slow.main.lengths) + len(slow.dropped) >= long_rows.LONG_ROW, "long enough to be looked at first"


@pytest.mark.parametrize("kind", ["tools", "plain"])
@pytest.mark.parametrize("tokenizer", ["written out", "known"], indirect=True)
def test_the_work_grows_with_the_row_not_with_its_square(
    tokenizer: Tokenizer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = []
    for rounds in (60, 600):
        work.clear()
        tokenise_rows([(1, row(rounds, kind))], TokeniseJob("f", "chatml", tokenizer, 200, "drop", False))
        done.append(dict(work))
    for unit, few in done[0].items():
        assert few > 0
        assert done[1][unit] <= 10.5 * few
