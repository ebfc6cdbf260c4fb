"""What surrounds the code is true: llms.txt, citation, issue templates, the site's pages, releases in the changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.version import __version__
from support.llms import llms_text

SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


def test_llms_txt_lists_every_page_as_it_is(root: Path):
    fix = "python tests/support/llms.py > llms.txt"
    assert (root / "llms.txt").read_text(encoding="utf-8") == llms_text(), fix


def test_the_changelog_has_dated_releases_from_new_to_old(root: Path):
    heads = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    releases = [re.fullmatch(r"(\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)", head) for head in heads]
    assert [head for head, release in zip(heads, releases) if release is None] == []
    found = [(release[1], release[2]) for release in releases if release]
    assert found
    assert [version for version, _ in found if not SEMANTIC.fullmatch(version)] == []
    numbers = [tuple(map(int, version.split("."))) for version, _ in found]
    assert numbers == sorted(set(numbers), reverse=True)
    assert [when for _, when in found[1:] if when == "unreleased"] == []  # only the newest may be
    dates = [date.fromisoformat(when) for _, when in found if when != "unreleased"]
    assert dates == sorted(dates, reverse=True)
    assert found[0][0] == __version__


def test_the_citation_names_this_version_and_licence(root: Path):
    said = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license", "version"} <= set(said)
    assert said["version"] == __version__
    assert said["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_issue_templates_ask_what_their_form_can_hold(name: str, root: Path):
    form = yaml.safe_load((root / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)
    assert any(part.get("validations", {}).get("required") for part in fields)


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_the_site_has_every_page_once(root: Path):
    docs = root / "docs"
    listed = pages_of(yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    joined = {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}  # docs/site.py takes them from the top
    assert sorted(listed) == sorted({page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} | joined)


@pytest.mark.full
def test_the_site_builds_without_a_warning_and_its_search_finds_both_languages(root: Path, tmp_path: Path):
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install erniekit-torch[docs]")
    for name in ("docs", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copyfile
        copy(root / name, tmp_path / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "lora_rank" in index
    assert "快速上手" in index
    unread = [page for page in (tmp_path / "site").rglob("*.html") if "```" in page.read_text(encoding="utf-8")]
    assert unread == []  # a fence that is not understood swallows the rest of its page
    assert (tmp_path / "site" / "python-api" / "index.html").is_file()
