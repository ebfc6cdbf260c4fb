"""Samples of an evaluation, and reasoning: folded, escaped, and without HTML of the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.webui.chat_pictures import as_displayed, safe_markdown
from erniekit.webui.samples import FILE, MAX_BYTES, MAX_SHOWN, last_samples, samples_html, thought_and_answer

LABELS = {name: name for name in ("title", "prompt", "answer", "expected", "thinking")}


def row(step: int, answer: str = "yes", **more: object) -> dict[str, object]:
    return {"global_step": step, "prompt": "so?", "answer": answer, "reference": "no", **more}


def write(folder: Path, *rows: object) -> None:
    (folder / FILE).write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_the_last_evaluations_samples_are_shown_and_damage_is_passed_over(tmp_path: Path) -> None:
    assert last_samples(tmp_path) == []
    write(tmp_path, row(10), [1], "x", {"answer": "no step"}, *[row(20, str(n)) for n in range(MAX_SHOWN + 3)])
    found = last_samples(tmp_path)
    assert [one["answer"] for one in found] == [str(n) for n in range(MAX_SHOWN)]
    write(tmp_path, row(10, "x" * MAX_BYTES), row(30, "end"))
    assert [one["answer"] for one in last_samples(tmp_path)] == ["end"], "only the end of a long file is read"


def test_a_thought_is_folded_and_everything_is_escaped() -> None:
    html = samples_html([row(5, "<think>hm <b></think><script>alert(1)</script>")], LABELS)
    assert '<details class="ek-thought"><summary>thinking</summary>' in html
    assert "hm &lt;b&gt;" in html
    assert "<script>" not in html
    assert "<details open" not in html


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("\n<think>\na\n</think>\n\nb", ("a", "b")),
        ("<think>cut off", ("cut off", "")),
        ("plain <think>x</think>", ("", "plain <think>x</think>")),
    ],
)
def test_a_thought_stands_before_its_answer(text: str, parts: tuple[str, str]) -> None:
    assert thought_and_answer(text) == parts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("**bold** <img src=x onerror=alert(1)>", "**bold** &lt;img src=x onerror=alert(1)>"),
        ("`a < b` and <b>", "`a < b` and &lt;b>"),
        ("```html\n<b>x</b>\n```\n<i>", "```html\n<b>x</b>\n```\n&lt;i>"),
        ("```py\nif a < b:", "```py\nif a < b:"),
        ("`open <script>\n</script>", "`open &lt;script>\n&lt;/script>"),
    ],
)
def test_tags_in_an_answer_are_text_and_code_stays_code(text: str, shown: str) -> None:
    assert safe_markdown(text) == shown
    assert as_displayed([{"role": "assistant", "content": text}]) == [{"role": "assistant", "content": shown}]
