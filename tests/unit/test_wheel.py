"""What `make wheel` builds is whole: every file of the package, its recipes, its metadata; and it runs from there."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from erniekit.version import __version__
from support.built import Distributions, build_distributions

SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)((a|b|rc)\d+|\.dev\d+)?")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return build_distributions(tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_file_of_the_package_and_every_recipe_and_nothing_else(built: Distributions, root: Path):
    src, examples = root / "src", root / "examples"
    package = {p.relative_to(src).as_posix() for p in (src / "erniekit").rglob("*") if p.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    recipes = {p.relative_to(root).as_posix() for p in examples.rglob("*.yaml")} | {"examples/recipes.json"}
    inside = set(zipfile.ZipFile(built.wheel).namelist())
    ours = {name for name in inside if ".dist-info/" not in name}
    assert package - ours == set()
    assert {f"erniekit/{name}" for name in recipes} - ours == set()
    extra = ours - package
    assert {name for name in extra if not name.startswith("erniekit/examples/")} == set()
    assert {Path(name).suffix for name in extra} == {".yaml", ".json"}


def test_the_metadata_names_version_licence_python_command_and_every_extra(built: Distributions):
    with zipfile.ZipFile(built.wheel) as wheel:
        info = f"erniekit_torch-{__version__}.dist-info"
        said = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert said["Name"] == "erniekit-torch"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.10"
    assert "erniekit = erniekit.cli.main:main" in scripts
    assert SEMANTIC.fullmatch(said["Version"])
    assert {"serve", "webui", "wandb", "gguf"} <= set(said.get_all("Provides-Extra") or ())


def test_the_source_distribution_has_docs_examples_and_what_builds_it(built: Distributions):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "constraints.txt"}
    assert wanted <= names
    assert {"docs/getting-started.md", "docs/zh/README.md", "examples/data/sft-train.jsonl"} <= names
    assert not any(name.startswith(("tests/", ".")) or name.endswith(".pyc") for name in names)


ALONE = """
import sys
import erniekit
from erniekit.cli.main import main
assert main(["version"]) == 0
assert main(["recipes", "ERNIE-4.5-0.3B/run_chat", "--flat"]) == 0
print(erniekit.__file__, erniekit.__version__, "torch" in sys.modules)
"""


def test_import_help_version_and_recipes_work_from_the_wheel_alone(built: Distributions, tmp_path: Path):
    target, here = tmp_path / "target", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(built.wheel) as wheel:  # as pip lays out a wheel of Python alone
        wheel.extractall(target)
    env = {**os.environ, "PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    said = run("-c", ALONE)
    assert said.splitlines()[-1].split() == [str(target / "erniekit" / "__init__.py"), __version__, "False"]
    assert f"version : {__version__}" in said
    assert "model_name_or_path: " in said
    assert f"erniekit {__version__}" in run("-m", "erniekit", "--help")
    assert list(here.iterdir()) == []
