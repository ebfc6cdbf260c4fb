"""Optional kernel libraries are installed in the versions that were measured: said in three places, alike in all."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

LIBRARIES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")


def pinned(words: list[str]) -> dict[str, str]:
    found = (re.fullmatch(r"([\w-]+?)(?:\[\w+\])?==([\w.]+)", word.strip()) for word in words)
    return {match[1]: match[2] for match in found if match and match[1] in LIBRARIES}


def test_the_extra_installs_the_versions_that_the_figures_were_measured_with(root: Path) -> None:
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flash4"]
    page = (root / "docs" / "performance.md").read_text()
    figures = " ".join(page[page.index("## Figures") :].split("|")[0].split())
    measured = {name: match[1] for name in LIBRARIES if (match := re.search(rf"{name} ([\w.]+)", figures))}
    assert pinned(extra) == measured
    assert set(measured) == set(LIBRARIES)
    assert len(extra) == len(LIBRARIES), "every requirement of the extra is pinned"


def test_constraints_name_the_same_versions(root: Path) -> None:
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flash4"]
    assert pinned((root / "constraints.txt").read_text().splitlines()) == pinned(extra)
