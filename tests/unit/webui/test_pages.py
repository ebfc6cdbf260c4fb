"""What the pages make of values and answers, before a browser sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gradio", reason='the page needs gradio: pip install "erniekit-torch[webui]"')

import gradio as gr

from erniekit.errors import ConfigError
from erniekit.webui.chat_leases import ChatLeases
from erniekit.webui.forms import FormProblem, form
from erniekit.webui.jobs import Jobs
from erniekit.webui.pages.chat import _assistant_messages, _request_messages, _throttled
from erniekit.webui.pages.fields import FormFields, recipe, uploaded
from erniekit.webui.pages.page_context import Labels, PageContext, notice, problems_html
from erniekit.webui.pages.runs import RunsPage, distinct
from erniekit.webui.paths import Roots
from erniekit.webui.runs import Runs


@pytest.fixture
def context(tmp_path: Path) -> PageContext:
    roots = Roots([tmp_path])
    jobs = Jobs(tmp_path / "webui", roots)
    return PageContext(jobs, Runs(jobs), jobs.roots, Labels("en"), ChatLeases(jobs))


@pytest.fixture
def fields(context: PageContext) -> FormFields:
    made = FormFields("train", context, ("model_name_or_path", "train_dataset_path"))
    with gr.Blocks():
        for spec in form("train.sft").fields:
            made.add(spec)
    return made


def test_a_form_left_alone_is_an_empty_recipe(fields: FormFields, context: PageContext) -> None:
    raw = [component.value for component in fields.components]
    text, problems = recipe(fields.values(raw), "", "train.sft", context)
    assert text == "stage: SFT\n"
    assert {p.key for p in problems} == {"model_name_or_path", "train_dataset_path"}


def test_a_number_that_may_be_left_out_is_shown_empty_and_not_as_0(fields: FormFields, context: PageContext) -> None:
    limit = fields.component("save_total_limit")
    assert limit.value == ""
    at = fields.components.index(limit)
    assert fields.updates({})[at]["value"] == ""
    raw = [component.value for component in fields.components]
    for typed, read in (("3", 3), (" 3 ", 3), ("three", "three")):
        raw[at] = typed
        assert fields.values(raw)["save_total_limit"] == read
    _, problems = recipe(fields.values(raw), "", "train.sft", context)
    assert "save_total_limit" in {p.key for p in problems}


def test_values_go_into_the_form_and_come_out_the_same(fields: FormFields) -> None:
    given = {
        "model_name_or_path": "m", "train_dataset_path": ["a.jsonl", "b.jsonl"], "train_dataset_prob": [0.5, 0.5],
        "learning_rate": 3e-4, "recompute": True, "save_total_limit": 3, "sharding": ["stage1"], "packing": True,
    }  # fmt: skip
    raw = [update["value"] for update in fields.updates(given)]
    out = fields.values(raw)
    assert {key: out[key] for key in given if key != "train_dataset_prob"} == {
        key: value for key, value in given.items() if key != "train_dataset_prob"
    }
    assert [float(word) for word in out["train_dataset_prob"]] == [0.5, 0.5]


def test_further_keys_join_the_recipe_and_a_mistake_in_them_is_told(context: PageContext) -> None:
    values = {"model_name_or_path": "m", "train_dataset_path": ["a.jsonl"]}
    text, _ = recipe(values, "adam_beta1: 0.8", "train.sft", context)
    assert "adam_beta1: 0.8" in text
    _, problems = recipe(values, "adam_beta1: [", "train.sft", context)
    assert problems


def test_every_label_changes_with_the_language(fields: FormFields) -> None:
    english, chinese = fields.labels.updates("en"), fields.labels.updates("zh")
    assert len(english) == len(chinese) == len(fields.components)
    rate = list(fields.specs).index("learning_rate")
    assert (english[rate]["label"], chinese[rate]["label"]) == ("Learning rate", "学习率")


def test_a_file_that_was_not_uploaded_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uploads").mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    for name in ("uploads/good.yaml", "secret.yaml"):
        (tmp_path / name).write_text("max_steps: 3\n")
    (tmp_path / "uploads" / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    assert uploaded(str(tmp_path / "uploads" / "good.yaml")) == {"max_steps": 3}
    for name in ("secret.yaml", "uploads/../secret.yaml", "uploads/link.yaml"):
        with pytest.raises(gr.Error, match="not uploaded"):
            uploaded(str(tmp_path / name))


def test_an_uploaded_recipe_is_taken_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    file = tmp_path / "recipe.yaml"
    file.write_text("max_steps: 3\n" + "# comment\n" * 15_000 + "learning_rate: 0.5\n")
    with pytest.raises(gr.Error, match="more than"):
        uploaded(str(file))
    file.write_bytes("run_name: 张三\n".encode("gbk"))
    with pytest.raises(gr.Error, match="UTF-8"):
        uploaded(str(file))


def test_the_table_of_runs_is_sent_only_when_it_has_changed(context: PageContext) -> None:
    page = RunsPage.__new__(RunsPage)
    page.context = context
    table, drawn = page.rows("en", ["20260101-000000-abcdef"], "", "")
    assert table == drawn
    assert not isinstance(page.rows("en", [], "", drawn)[0], str)


def test_runs_of_the_same_name_are_told_apart() -> None:
    assert distinct({"a": "x", "b": "x", "c": "y", "d": "x"}) == {"a": "x", "b": "x (2)", "c": "y", "d": "x (3)"}


def test_what_is_wrong_is_escaped_before_it_is_shown() -> None:
    assert "<script>" not in problems_html([FormProblem("<script>", "<script>", "<script>")], "en")
    assert "<b>" not in notice(ConfigError("<b>", where="", fix="<b>")).message


def test_thoughts_are_shown_apart_and_kept_out_of_the_next_question() -> None:
    *_, (thought, answer) = _throttled(iter([("thought", "hm"), ("thought", "m"), ("answer", "yes"), ("answer", "!")]))
    turns = _assistant_messages(thought, answer, "Thinking")
    assert turns[0]["metadata"] == {"title": "Thinking", "status": "done"}
    assert turns[0]["content"] == "hmm"
    asked = _request_messages([{"role": "user", "content": [{"type": "text", "text": "so?"}]}, *turns])
    assert asked == [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes!"}]
