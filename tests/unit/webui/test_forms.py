"""Forms follow the declared keys, and their values go to YAML and back without changing what a run would be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from erniekit.cli.config_command import purpose
from erniekit.config import load
from erniekit.config.flat import DEFAULTS, KEYS
from erniekit.config.recipe_text import recipe_lines
from erniekit.config.sources import collect
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.webui import forms
from erniekit.webui.form_pages import PAGES
from erniekit.webui.paths import Roots

GOOD = {"model_name_or_path": "m", "train_dataset_path": ["a.jsonl"]}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_field_of_a_page_is_a_key_with_help_and_a_kind_that_can_hold_its_default(page: str) -> None:
    form = forms.form(page)
    assert len({f.key for f in form.fields}) == len(form.fields) > 4
    for f in form.fields:
        assert f.help == KEYS[f.key].help
        assert f.kind != "choice" or f.default in f.choices or f.default is None, f.key
        assert f.kind != "number" or isinstance(f.default, (int, float)) or (f.default is None and f.optional), f.key
        assert f.kind != "flag" or isinstance(f.default, bool) or (f.default is None and f.optional), f.key
        assert (f.kind == "list") == isinstance(f.default, list), f.key


@pytest.mark.parametrize("page", sorted(PAGES))
def test_no_page_offers_a_secret_a_program_or_what_a_later_version_brings(page: str) -> None:
    for f in forms.form(page).fields:
        assert f.key not in forms.NEVER
        assert not KEYS[f.key].secret
        assert not KEYS[f.key].not_yet


@pytest.mark.parametrize("page", sorted(PAGES))
def test_untouched_fields_write_nothing_and_lack_only_what_is_needed(page: str) -> None:
    form = forms.form(page)
    told = forms.from_yaml(forms.to_yaml(form.defaults(), page))
    assert told == {**form.fixed, **PAGES[page].defaults}
    lacking = {p.key for p in forms.check(form.defaults(), page)}
    assert lacking == set(form.needed) | ({"train_dataset_path"} if page == "train.pt" else set())


def test_the_declared_page_of_a_command_is_found_again() -> None:
    assert forms.page_of("train", {"stage": "DPO"}) == "train.dpo"
    assert forms.page_of("doctor", {}) == "train.sft"
    assert forms.page_of("server", {}) == "chat"
    assert forms.page_of("eval", {}) == "evaluate"


def test_yaml_holds_what_differs_in_the_order_of_the_keys_whatever_the_order_of_the_values() -> None:
    values = {"learning_rate": "3e-4", "max_steps": 3, **GOOD, "lora_rank": 8, "recompute": True}
    text = forms.to_yaml(values, "train.sft")
    assert text == forms.to_yaml(dict(reversed(values.items())), "train.sft")
    assert list(yaml.safe_load(text)) == [
        "model_name_or_path", "train_dataset_path", "stage", "max_steps", "learning_rate", "recompute",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["off", "1:1", "007", "- x", "a: b", "#c", "'q'", '"', "None", "数据", "{a}", "@x", "%y", "!!python/x", "~"]
)
def test_text_that_yaml_would_read_as_something_else_comes_back_as_it_was(text: str) -> None:
    told = forms.from_yaml(forms.to_yaml({**GOOD, "run_name": text}, "train.sft"))
    assert told.get("run_name") == (None if text in ("None", "~") else text)


def test_every_shipped_recipe_goes_through_a_form_and_stays_the_same_run(root: Path) -> None:
    recipes = sorted((root / "examples" / "configs").rglob("*.yaml"))
    assert len(recipes) > 30
    for file in recipes:
        given = collect([str(file)], "config").given
        text = "\n".join(recipe_lines({name: g.value for name, g in given.items()}))  # as recipes --flat has it
        values = forms.from_yaml(text)
        if "VL" in values.get("stage", ""):  # the page has no form for pictures
            continue
        command = {"chat": "server"}.get(word := purpose(load([str(file)], "config")), word)
        before = load([str(file)], command)
        page = forms.page_of(command, values)
        after = load([], command, forms.from_yaml(forms.to_yaml(values, page)))
        left = {"moe_multimodal_dispatch_use_allgather"}  # '' is a value of it, and no value of a form
        differs = [k for k in DEFAULTS if before[k] != after[k] and not KEYS[k].secret and k not in left]
        assert not differs, f"{file}: {differs}"


def test_a_recipe_that_extends_another_reads_no_file_and_says_how_to_have_it_whole() -> None:
    with pytest.raises(ConfigError) as e:
        forms.from_yaml("seed: 1\nbase: ../../../../etc/hosts.yaml\n")
    assert e.value.where == "recipe.yaml:2"
    assert "--flat" in e.value.fix


def test_a_recipe_that_is_wrong_is_told_with_its_line_as_the_command_line_would(tmp_path: Path) -> None:
    text = "max_steps: 3\nlearning_rate: fast\n"
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as ours:
        forms.from_yaml(text)
    with pytest.raises(ConfigError) as theirs:
        load([str(tmp_path / "recipe.yaml")], "train")
    assert ours.value.where == "recipe.yaml:2"
    assert theirs.value.where.endswith("recipe.yaml:2")
    assert (ours.value.what, ours.value.fix) == (theirs.value.what, theirs.value.fix)


@pytest.mark.parametrize(
    "text",
    ["a: [", "lrate: 1", "max_steps: 1\nmax_steps: 2", "x: !!python/object/apply:os.system [id]", "- a\n- b", "\x00",
     "a: &a [1]\nb: *a", "\ud800"],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_refused_without_the_name_of_a_temporary_file(text: str) -> None:
    with pytest.raises(ErnieKitError) as error:
        forms.from_yaml(text)
    assert "/tmp" not in str(error.value)


def test_all_that_is_wrong_is_told_at_once_each_with_its_key(tmp_path: Path) -> None:
    values = {**GOOD, "learning_rate": "x", "batch_size": 0, "compute_type": "bf17", "output_dir": "../../x", "lr": 1}
    (tmp_path / "m").mkdir()
    (tmp_path / "a.jsonl").touch()
    problems = {p.key: p for p in forms.check(values, "train.sft", Roots([tmp_path]))}
    assert set(problems) == {"learning_rate", "batch_size", "compute_type", "output_dir", "lr"}
    assert "bf16" in problems["compute_type"].fix


def test_files_that_are_not_there_are_told_before_a_process_is_started(room: Path) -> None:
    def told(**values: object) -> dict[str, str]:
        given = {"model_name_or_path": "model", "train_dataset_path": ["data.jsonl"], **values}
        return {p.key: p.what for p in forms.check(given, "train.sft", Roots([room]))}

    assert told() == {}
    assert told(model_name_or_path="baidu/ERNIE-4.5-0.3B-PT") == {}, "may be in the download cache"
    (room / "deep").mkdir()
    for key, value, named in (
        ("model_name_or_path", "models", "models"),
        ("model_name_or_path", "deep/model", "deep/model"),
        ("train_dataset_path", ["data.jsonl", "dta.jsonl"], "dta.jsonl"),
        ("eval_dataset_path", "no.jsonl", "no.jsonl"),
        ("teacher_model_name_or_path", "teacher", "teacher"),
    ):
        assert told(**{key: value}) == {key: f"{key} does not exist: {named}"}


def test_values_that_are_wrong_together_are_told_as_the_run_would_say_it() -> None:
    values = {**GOOD, "global_batch_size": 3, "batch_size": 2}
    (problem,) = forms.check(values, "train.sft")
    with pytest.raises(ConfigError) as error:
        load([], "train", values)
    assert problem.what == error.value.what
    assert problem.key in ("global_batch_size", "batch_size")


def test_what_this_version_lacks_is_refused_before_a_process_is_started() -> None:
    keys = {p.key for p in forms.check({**GOOD, "compute_type": "fp16"}, "train.sft")}
    assert "compute_type" in keys
    assert {p.key for p in forms.check({**GOOD, "stage": "OCR-VL-SFT"}, "train.sft")} == {"stage"}


@pytest.mark.parametrize("key", sorted(forms.NEVER))
def test_keys_that_run_programs_or_open_the_machine_are_refused_even_in_a_loaded_recipe(key: str, room: Path) -> None:
    value = {"bool": "True", "int": "2"}.get(KEYS[key].item, "/bin/sh")
    text = f"model_name_or_path: model\ntrain_dataset_path: [data.jsonl]\n{key}: {value}\n"
    with pytest.raises(ConfigError, match=f"{key} cannot be set from the page"):
        forms.checked(text, "train", Roots([room]))


def test_text_over_the_limit_or_with_control_characters_is_refused() -> None:
    for text in ("x" * 10_000, "a\nb", "a\x00b", "a\x1b[31m"):
        (problem,) = forms.check({**GOOD, "run_name": text}, "train.sft")
        assert problem.key == "run_name"
        assert len(problem.what) < 200


def test_the_backend_imports_neither_gradio_nor_torch() -> None:
    names = ("forms", "jobs", "runs", "paths", "preview", "guard", "translations", "process")
    look = "print([m for m in ('torch', 'numpy', 'gradio') if m in sys.modules])"
    code = f"import sys; from erniekit.webui import {', '.join(names)}; {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("output", ["model", "model/out", "link", "taken", "file"])
def test_an_output_folder_that_training_would_refuse_is_told_on_the_form(tmp_path: Path, output: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("notes")
    (tmp_path / "data.jsonl").write_text("{}\n")
    values = {"model_name_or_path": "model", "train_dataset_path": ["data.jsonl"], "output_dir": output}
    problems = forms.check(values, "train.sft", Roots([tmp_path]))
    assert [p.key for p in problems] == ["output_dir"]
    assert forms.check({**values, "output_dir": "fresh"}, "train.sft", Roots([tmp_path])) == []
    assert not (tmp_path / "fresh").exists(), "asking creates nothing"
