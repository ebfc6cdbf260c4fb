"""`base:` in a recipe: values come from the file that gives them, later files win, and a broken chain is refused."""

from __future__ import annotations

import pytest

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.extends import LONGEST
from erniekit.config.sources import collect
from erniekit.errors import ConfigError


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Recipes by relative path, and the folder as the working one."""
    monkeypatch.chdir(tmp_path)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def error(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as e:
        load(list(words))
    return e.value


def test_a_recipe_has_what_its_base_gives_and_each_value_names_its_file(tree):
    tree(a__base="seed: 7\nmax_steps: 10\n", b__mid="base: ../a/base.yaml\nmax_steps: 20\n")
    tree(b__deep__run="base: ../mid.yaml\nlearning_rate: 1e-4\n")
    cfg = load(["b/deep/run.yaml", "seed=9"])
    assert (cfg.train.seed, cfg.train.max_steps, cfg.optim.learning_rate) == (9, 20, 1e-4)
    assert cfg.origin("max_steps") == "b/mid.yaml:2"
    assert cfg.origin("learning_rate") == "b/deep/run.yaml:2"
    assert cfg.files == ("a/base.yaml", "b/mid.yaml", "b/deep/run.yaml")
    assert not cfg.typed("max_steps")
    assert cfg.typed("seed")


def test_a_path_is_relative_to_the_file_that_names_it_not_to_the_working_folder(tree, tmp_path):
    tree(a__base="seed: 7\n", a__run="base: base.yaml\n")
    assert load([str(tmp_path / "a" / "run.yaml")]).train.seed == 7


def test_a_base_may_be_sectioned_or_json(tree, tmp_path):
    (tmp_path / "old.json").write_text('{"trainer_args": {"max_steps": 5}}')
    tree(run="base: old.json\nseed: 3\n")
    cfg = load(["run.yaml"])
    assert (cfg.train.max_steps, cfg.train.seed, cfg.train.stage) == (5, 3, "PT")


@pytest.mark.parametrize("link", ["a", "b"])
def test_a_circle_is_refused_with_the_line_that_closes_it(tree, link, capsys):
    tree(a="seed: 1\nbase: b.yaml\n", b=f"base: {link}.yaml\n")
    found = error("a.yaml")
    assert "in a circle" in found.what
    assert found.where == "b.yaml:1"
    assert main(["config", "a.yaml"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


def test_a_recipe_that_extends_itself_is_refused_by_name(tree):
    tree(run="base: run.yaml\n")
    found = error("run.yaml")
    assert (found.what, found.where, found.fix) == (
        "run.yaml extends itself",
        "run.yaml:1",
        "take `base` out of run.yaml",
    )


def test_a_base_that_is_not_there_is_the_fault_of_its_line(tree, capsys):
    tree(run="seed: 1\nbase: run2.yaml\n")
    found = error("run.yaml")
    assert "cannot read run2.yaml" in found.what
    assert found.where == "run.yaml:2"
    assert "did you mean run.yaml?" in found.fix
    assert main(["config", "run.yaml"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


@pytest.mark.parametrize("value", ["[a.yaml, b.yaml]", "3", "folder", "", "{a: 1}"])
def test_a_base_that_is_no_recipe_is_refused(tree, value):
    tree(run=f"base: {value}\n")
    assert error("run.yaml").where == "run.yaml:1"
    assert "None" not in error("run.yaml").what


def test_an_absolute_base_is_refused_with_the_relative_one(tree, tmp_path):
    tree(a="seed: 1\n", run=f"base: {tmp_path}/a.yaml\n")
    assert error("run.yaml").fix == "base: a.yaml"


def test_a_chain_that_is_too_long_is_refused(tree):
    tree(**{f"r{i}": f"base: r{i + 1}.yaml\n" for i in range(LONGEST)}, **{f"r{LONGEST}": "seed: 1\n"})
    assert "extend each other" in error("r0.yaml").what
    assert load(["r1.yaml"]).train.seed == 1


def test_an_unknown_key_of_a_base_names_the_bases_line(tree):
    tree(a="sede: 1\n", run="base: a.yaml\n")
    assert error("run.yaml").where == "a.yaml:1"


def test_base_is_no_key_of_the_command_line(tree):
    tree(a="seed: 1\n")
    assert "name both files" in error("base=a.yaml").fix


def test_a_recipe_that_must_stand_alone_reads_no_other_file(tree):
    tree(run="base: absent.yaml\n")
    with pytest.raises(ConfigError, match="cannot extend"):
        collect(["run.yaml"], "train", standalone=True)
