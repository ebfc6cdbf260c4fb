"""Every stage has a form: with the keys it reads, without those it would ignore, with a row that its reader takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.config.flat import KEYS
from erniekit.data.vision.read import read_vision_row
from erniekit.recipes import STAGES as RUN_STAGES
from erniekit.recipes.preview import preview
from erniekit.webui import forms
from erniekit.webui.form_pages import ROWS, STAGES

GOOD = {"model_name_or_path": "m", "train_dataset_path": ["a.jsonl"]}


def another(key: str) -> object:
    """A value that is not the default."""
    k = KEYS[key]
    if k.choices:
        return next(choice for choice in k.choices if choice != k.default)
    if k.is_list:
        return ["a", "b"]
    return {"bool": not k.default, "str": "teacher", "int": 7, "float": 0.25}[k.item]


def ignored(stage: str, key: str) -> bool:
    teacher = {"teacher_model_name_or_path": "t"} if KEYS[key].section == "distill" else {}
    cfg = load([], "train", {**GOOD, "stage": stage, **teacher, key: another(key)})
    return any(note.key == key and "without effect" in note.reason for note in cfg.notes)


def test_the_page_has_a_form_for_every_stage_that_runs() -> None:
    assert set(STAGES) == set(RUN_STAGES)
    for stage, page in STAGES.items():
        assert forms.page_of("train", {"stage": stage}) == page
        assert forms.form(page).fixed["stage"] == stage


@pytest.mark.parametrize("stage", ["SFT", "DPO", "KTO", "RM", "CLS"])
def test_a_stage_offers_the_keys_of_its_own_that_it_reads_and_no_others(stage: str) -> None:
    offered = {f.key for f in forms.form(STAGES[stage]).fields}
    own = [k.name for k in KEYS.values() if k.section in ("dpo", "score")]
    assert own
    assert {key for key in own if not ignored(stage, key)} == offered & set(own)
    distill = {k.name for k in KEYS.values() if k.section == "distill"}
    assert offered & distill == (distill if stage == "SFT" else set())


@pytest.mark.parametrize("stage", ["PT", "RM", "CLS"])
@pytest.mark.parametrize("choice", ["Full", "LoRA"])
def test_what_the_form_of_a_stage_shows_is_trained_though_its_default_is_all_weights(stage: str, choice: str) -> None:
    page = STAGES[stage]
    implied = load([], "train", {**GOOD, "stage": stage})["fine_tuning"]
    assert forms.form(page).defaults()["fine_tuning"] == implied == "Full"
    text = forms.to_yaml({**GOOD, "fine_tuning": choice}, page)
    assert not forms.check({**GOOD, "fine_tuning": choice}, page)
    assert load([], "train", forms.from_yaml(text))["fine_tuning"] == choice


@pytest.mark.parametrize("stage", STAGES)
def test_a_recipe_of_a_stage_stays_of_that_stage_on_its_way_through_the_form(stage: str) -> None:
    given = {**GOOD, "stage": stage}
    again = forms.from_yaml(forms.to_yaml(given, forms.page_of("train", given)))
    assert load([], "train", again).train.stage == stage


@pytest.mark.parametrize("stage", STAGES)
def test_the_row_that_is_shown_for_a_stage_is_one_that_it_reads(stage: str, tmp_path: Path) -> None:
    value = json.loads(ROWS[stage])
    if stage == "VL-SFT":
        row = read_vision_row(value, tmp_path, "messages", compat=False)
        assert not row.unused
        return
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(value) + "\n", encoding="utf-8")
    (shown,) = preview(load([], "data", {"stage": stage, "train_dataset_path": [str(file)]}), 0, 1)["rows"]
    assert not shown.get("problem")
    assert not shown.get("unused")
    assert shown["pieces"]
