"""Optional kernel libraries are installed in the versions that were measured: said in three places, alike in all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


@pytest.mark.full
def test_what_pip_installs_for_the_extra_is_what_was_measured_and_imports_together(root: Path, tmp_path: Path) -> None:
    """As a user installs it, without the constraints file: quack-kernels 0.6.5 broke with a newer cutlass-dsl."""
    pip = (sys.executable, "-m", "pip", "--quiet", "install")
    subprocess.run([*pip, "--dry-run", "--report", tmp_path / "report.json", "-e", f"{root}[flash4]"], check=True)
    found = [entry["metadata"] for entry in json.loads((tmp_path / "report.json").read_text())["install"]]
    versions = {each["name"]: each["version"] for each in found if each["name"] != "erniekit-torch"}
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flash4"]
    assert pinned(extra).items() <= versions.items()
    assert "torch" not in versions, "an installed torch stays as it is"

    site = tmp_path / "site-packages"
    resolved = [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run([*pip, "--no-deps", "--target", site, *resolved], check=True)
    paths = (site, site / "nvidia_cutlass_dsl" / "dsl_packages")  # the second by a .pth file, which a target has not
    run = subprocess.run(
        [sys.executable, "-c", "import cutlass, quack.gemm_interface, flash_attn.cute"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
