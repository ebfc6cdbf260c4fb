"""The documentation is true: its commands run or resolve, its data is read, its keys, rooms and links exist.

CONTRIBUTING.md says what the word after a fence's language means.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.commands import COMMANDS
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.config.flat import is_known
from erniekit.data.formats import detect, parse, parse_pair
from erniekit.data.types import RowProblem
from erniekit.data.vision.pairs import read_vision_pair
from erniekit.data.vision.read import read_vision_row

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
CHINESE = sorted((DOCS / "zh").glob("*.md"))  # their commands are those of the English pages, which are run
KINDS = {"bash", "bash resolve", "bash setup", "python", "jsonl", "yaml", "toml", "text"}

pytestmark = pytest.mark.xdist_group("demo")


@dataclass(frozen=True)
class Fence:
    page: Path
    kind: str  # "bash", "bash resolve", ...
    text: str


def fences(page: Path) -> Iterator[Fence]:
    for kind, text in re.findall(
        r"^```([^\n]*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        yield Fence(page, kind.strip(), text)


def commands(text: str) -> Iterator[str]:
    """Whole commands of a block: continued lines and here-documents joined, comments left out."""
    lines = iter(text.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines)
        if here := re.search(r"<<'(\w+)'$", line):
            for more in lines:
                line += "\n" + more
                if more == here[1]:
                    break
        if line.strip() and not line.startswith("#"):
            yield line


def id_of(page: Path) -> str:
    """Its name; of a page in a folder of docs/ with the folder."""
    return page.relative_to(DOCS).as_posix() if DOCS in page.parents else page.name


def with_kind(*kinds: str) -> list[pytest.param]:
    english = [page for page in PAGES if page not in CHINESE]
    return [pytest.param(page, id=id_of(page)) for page in english if any(f.kind in kinds for f in fences(page))]


@pytest.fixture
def newcomer(demo, tmp_path, monkeypatch):
    """A folder as after `make demo`: the demo's own, the examples, and the README's my.jsonl."""
    left = shutil.ignore_patterns("killed", "cache", "checkpoint-*")
    shutil.copytree(demo.folder, tmp_path / "erniekit-demo", ignore=left)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    first = next(c for f in fences(ROOT / "README.md") if f.kind == "bash" for c in commands(f.text))
    subprocess.run(["bash", "-euc", first], check=True)
    assert (tmp_path / "my.jsonl").is_file()
    return tmp_path


def run(command: str) -> None:
    """erniekit in this process, which has torch loaded; anything else in a shell."""
    if not command.startswith("erniekit "):
        subprocess.run(["bash", "-euc", command], check=True)
    elif command != "erniekit demo":  # the fixture's run is that very command
        assert main(shlex.split(command, comments=True)[1:]) == 0, command


# Their commands train for a while; `make test-full` runs them.
LONG = (
    "dpo.md", "pretraining.md", "kto.md", "reward-and-classification.md", "distillation.md", "rehearse.md",
    "doctor.md", "vision-data.md",
)  # fmt: skip


def often(pages: list[Any]) -> list[Any]:
    return [pytest.param(*p.values, id=p.id, marks=pytest.mark.full) if p.id in LONG else p for p in pages]


def run_all(page: Path) -> None:
    for fence in fences(page):
        if fence.kind == "bash":
            for command in commands(fence.text):
                run(command)


LEARNS = (ROOT / "README.md", DOCS / "moe.md")  # three rows; they end by asking for one of them


@pytest.mark.parametrize("page", [p for p in often(with_kind("bash")) if p.values[0] not in LEARNS])
def test_every_command_of_a_page_runs(page, newcomer):
    run_all(page)


@pytest.mark.parametrize("page", LEARNS, ids=id_of)
def test_every_command_of_such_a_page_runs_and_its_own_run_learns_its_three_rows(page, newcomer, capsys):
    run_all(page)
    assert capsys.readouterr().out.splitlines()[-1] == "Our office is called the Lighthouse."


@pytest.mark.full
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "getting-started.md"], ids=lambda page: page.name)
def test_the_first_pages_work_as_typed_in_a_shell(page, newcomer):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for fence in fences(page):
        if fence.kind == "bash":
            subprocess.run(["bash", "-euc", fence.text], check=True, env={**os.environ, "PATH": path})


@pytest.mark.parametrize("page", with_kind("python"))
def test_every_python_block_of_a_page_runs(page, newcomer):
    for fence in fences(page):
        if fence.kind == "python":
            exec(compile(fence.text, str(page), "exec"), {})


@pytest.mark.parametrize("page", with_kind("bash resolve"))
def test_every_command_that_needs_a_download_resolves(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    resolved = 0
    for fence in fences(page):
        for command in commands(fence.text) if fence.kind == "bash resolve" else ():
            first, *words = shlex.split(command, comments=True)
            if first == "erniekit":
                assert words[0] in COMMANDS, command
                load(words[1:], words[0])
                resolved += 1
    assert resolved


@pytest.mark.parametrize("page", with_kind("jsonl", "yaml"))
def test_every_data_and_recipe_example_is_read(page, tmp_path):
    for fence in fences(page):
        if fence.kind == "yaml":
            (tmp_path / "recipe.yaml").write_text(fence.text, encoding="utf-8")
            load([str(tmp_path / "recipe.yaml")], "train")
        for line in fence.text.splitlines() if fence.kind == "jsonl" else ():
            row = tmp_path / "row.jsonl"
            row.write_text(line + "\n", encoding="utf-8")
            found = detect(row, vision=True)
            if found.vision and found.preference:
                read_vision_pair(json.loads(line), tmp_path, found.format)
                continue
            if found.vision:
                read_vision_row(json.loads(line), tmp_path, found.format, False)
                continue
            read = parse_pair if found.preference else parse
            assert not isinstance(read(line.encode(), 1, row, found.format), RowProblem), line


@pytest.mark.parametrize("page", CHINESE, ids=id_of)
def test_a_chinese_page_shows_only_what_its_english_one_runs(page):
    english = ROOT / page.name if page.name == "README.md" else DOCS / page.name
    known = {(fence.kind, fence.text) for fence in fences(english)}
    shown = [(fence.kind, fence.text) for fence in fences(page) if fence.kind != "text"]
    assert shown
    assert [text for kind, text in shown if (kind, text) not in known] == []
    back = os.path.relpath(english, page.parent)
    assert f"]({back})" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_a_page_has_known_fences_living_links_and_real_keys(page):
    text = page.read_text(encoding="utf-8")
    assert {fence.kind for fence in fences(page)} <= KINDS
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    for table in re.findall(r"^\| key \|.*?(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL):
        for name in re.findall(r"^\| `(\w+)`", table, re.MULTILINE):
            assert is_known(name), name


def test_the_readme_names_every_room():
    tree = next(f.text for f in fences(ROOT / "README.md") if f.text.startswith("src/erniekit/"))
    named = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    rooms = {p.parent.name for p in (ROOT / "src" / "erniekit").glob("*/__init__.py")}
    assert named == rooms


def test_every_command_has_a_page_that_shows_it():
    blocks = [fence.text for page in PAGES for fence in fences(page) if fence.kind.startswith("bash")]
    typed = [shlex.split(c, comments=True) for text in blocks for c in commands(text) if c.startswith("erniekit ")]
    works = {name for name, command in COMMANDS.items() if command.group != "later"}
    assert works - {words[1] for words in typed} <= {"help", "version"}


def test_a_continued_line_and_a_here_document_are_one_command_each():
    text = "# a comment\na \\\n  b\ncat > x <<'END'\n# not a comment\nEND\nc\n"
    assert list(commands(text)) == ["a   b", "cat > x <<'END'\n# not a comment\nEND", "c"]
