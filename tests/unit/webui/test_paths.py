"""A path of a form ends inside the roots or is refused, however it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from erniekit.errors import ConfigError
from erniekit.webui.paths import PathError, Roots


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "leak").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "near").symlink_to(tmp_path / "in" / "deep")
    return Roots([tmp_path / "in"])


@pytest.mark.parametrize(
    "text", ["deep", "./deep", "deep/../deep/x.jsonl", "new/folder", "%2e%2e/x", "-x", "a b", "数据"]
)
def test_what_lies_inside_is_given_back_as_its_real_path(roots: Roots, text: str) -> None:
    real = roots.resolve(text)
    assert real == Path(os.path.realpath(roots.folders[0] / text))
    assert roots.folders[0] in real.parents


def test_a_link_inside_the_roots_is_followed(roots: Roots) -> None:
    assert roots.resolve("near/x") == roots.folders[0] / "deep" / "x"


@pytest.mark.parametrize(
    "text",
    ["..", "../out", "deep/../../out/x", "/etc/passwd", "leak", "leak/x", "/", "~root/x", "a\x00b", "a\nb", "", "  ",
     "x" * 300, "/".join(["x" * 100] * 20)],
)  # fmt: skip
def test_what_leads_out_or_is_no_path_is_refused_by_its_key(roots: Roots, text: str) -> None:
    with pytest.raises(PathError) as error:
        roots.resolve(text, "output_dir")
    assert error.value.where == "output_dir"
    assert len(error.value.what) < 200, "a message must not repeat ten thousand letters"


def test_a_folder_whose_name_begins_like_a_root_is_not_inside(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(PathError):
        Roots([tmp_path / "run"]).resolve(str(tmp_path / "runs"))


def test_further_roots_are_open_too(roots: Roots, tmp_path: Path) -> None:
    both = roots.with_folder(tmp_path / "out")
    assert both.resolve(str(tmp_path / "out" / "x")) == tmp_path.resolve() / "out" / "x"
    assert both.resolve("leak/x") == tmp_path.resolve() / "out" / "x"


def test_every_shape_of_a_key_that_holds_paths_is_resolved(roots: Roots) -> None:
    here = roots.folders[0]
    resolved = roots.resolve_values(
        {
            "output_dir": "run",
            "train_dataset_path": "a.jsonl, b.jsonl",
            "eval_dataset_path": ["c.jsonl"],
            "lora_modules": ["mine=run/lora"],
            "input_dir": "0.3 a 0.7 b",
            "resume_from_checkpoint": "True",
            "model_name_or_path": "baidu/ERNIE-4.5-0.3B-PT",
            "learning_rate": 1e-4,
        }
    )
    assert resolved["output_dir"] == str(here / "run")
    assert resolved["train_dataset_path"] == [str(here / "a.jsonl"), str(here / "b.jsonl")]
    assert resolved["eval_dataset_path"] == [str(here / "c.jsonl")]
    assert resolved["lora_modules"] == [f"mine={here / 'run' / 'lora'}"]
    assert resolved["input_dir"] == f"0.3 {here / 'a'} 0.7 {here / 'b'}"
    assert resolved["resume_from_checkpoint"] == "True"
    assert resolved["model_name_or_path"] == "baidu/ERNIE-4.5-0.3B-PT", "a hub id is not a path here"
    assert resolved["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_dataset_path", ["a.jsonl", "../out/b.jsonl"]),
        ("lora_modules", ["mine=../out"]),
        ("lora_modules", ["../out"]),
        ("lora_modules", ["--flag=deep"]),
        ("input_dir", "0.3 a 0.7 ../out/b"),
        ("model_name_or_path", "../out"),
    ],
)
def test_one_path_that_leads_out_is_enough(roots: Roots, key: str, value: object) -> None:
    with pytest.raises(PathError):
        roots.resolve_value(key, value)


def test_a_root_that_is_no_folder_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        Roots([tmp_path / "none"])


def test_the_key_of_a_jobs_server_is_no_file_to_work_on(tmp_path: Path) -> None:
    secret = tmp_path / "jobs" / "x" / "server.key"
    secret.parent.mkdir(parents=True)
    secret.write_text("key")
    for values in ({"data_filelist": str(secret)}, {"data_weights": str(secret)}, {"train_dataset_path": str(secret)}):
        with pytest.raises(PathError, match="secret"):
            Roots([tmp_path]).resolve_values(values)


@pytest.mark.parametrize("text", ["*.jsonl", "https://host/a*.jsonl"])
def test_a_pattern_is_refused_as_it_may_match_links_that_lead_out(roots: Roots, text: str) -> None:
    with pytest.raises(ConfigError):
        roots.resolve_value("train_dataset_path", text)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a.jsonl", "s3://bucket/a.jsonl", "file:///etc/passwd"])
def test_an_address_is_refused_and_never_fetched(roots: Roots, address: str) -> None:
    with pytest.raises(PathError, match="train_dataset_path is an address"):
        roots.resolve_value("train_dataset_path", address)


@pytest.mark.parametrize("place", ["a", "a/b/c/d/e/f"])
def test_a_link_out_is_found_however_deep_in_a_data_folder_and_behind_links_that_stay_inside(
    tmp_path: Path, place: str
) -> None:
    """A folder of data is read with all that lies below it."""
    deep = tmp_path / "in" / "data" / place
    deep.mkdir(parents=True)
    roots = Roots([tmp_path / "in"])
    (deep / "rows.jsonl").write_text("{}\n")
    assert roots.resolve_value("train_dataset_path", ["data"])
    (tmp_path / "in" / "other").mkdir()
    (deep / "near").symlink_to(tmp_path / "in" / "other")
    assert roots.resolve_value("train_dataset_path", ["data"])
    (tmp_path / "in" / "other" / "more.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(PathError, match=r"leads outside .*: more.jsonl"):
        roots.resolve_value("train_dataset_path", ["data"])
    (tmp_path / "in" / "other" / "more.jsonl").unlink()
    (deep / "chain").symlink_to(deep / "chain-2")
    (deep / "chain-2").symlink_to("../" * 30 + "etc")
    with pytest.raises(PathError, match="leads outside"):
        roots.resolve_value("train_dataset_path", ["data"])


def test_a_teacher_that_is_an_adapter_has_its_base_inside_as_well(tmp_path: Path) -> None:
    for name, base in (("good", "model"), ("bad", str(tmp_path / "elsewhere"))):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    (tmp_path / "in" / "model").mkdir()
    roots = Roots([tmp_path / "in"])
    given = {"model_name_or_path": "model", "teacher_model_name_or_path": "good"}
    assert roots.resolve_values(given)["teacher_model_name_or_path"] == str(roots.folders[0] / "good")
    with pytest.raises(PathError, match="of a model outside") as error:
        roots.resolve_values({**given, "teacher_model_name_or_path": "bad"})
    assert error.value.where == "teacher_model_name_or_path"
