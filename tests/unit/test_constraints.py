"""A new release of a requirement changes neither CI nor a set-up: each has one version in constraints.txt."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import tomllib
from packaging.requirements import Requirement


def pins(root: Path) -> dict[str, Requirement]:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {requirement.name.lower(): requirement for requirement in map(Requirement, lines)}


# What torch's wheels on PyPI require of triton; CPU builds, which CI may have, require none.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def wanted(root: Path) -> set[str]:
    """What `make` installs: the package's own requirements and those of its extra `dev`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found, open_ones = set(), [*project["dependencies"], *extras["dev"]]
    while open_ones:
        requirement = Requirement(open_ones.pop())
        if requirement.name == project["name"]:
            open_ones += [each for extra in requirement.extras for each in extras[extra]]
        else:
            found.add(requirement.name.lower())
    return found


def test_every_requirement_that_make_installs_has_one_version(root: Path) -> None:
    exact = {name for name, pin in pins(root).items() if re.fullmatch(r"==[\w.+]+", str(pin.specifier))}
    assert wanted(root) - exact == {"triton"}, "torch chooses its version"


def test_the_constraints_leave_torch_the_triton_that_it_requires(root: Path) -> None:
    """Otherwise nothing can be installed with constraints.txt where torch is a build with CUDA."""
    (torch,) = pins(root)["torch"].specifier
    assert pins(root)["triton"].specifier.contains(TRITON_OF_TORCH[torch.version])


def test_the_suite_runs_with_the_versions_of_the_constraints(root: Path) -> None:
    applying = {name: pin for name, pin in pins(root).items() if pin.marker is None or pin.marker.evaluate()}
    others = {
        name: version(name)
        for name in wanted(root) & set(applying)
        if not applying[name].specifier.contains(version(name).split("+")[0], prereleases=True)
    }
    assert others == {}, "make installs these anew: rm .venv/.ready && make .venv/.ready"
