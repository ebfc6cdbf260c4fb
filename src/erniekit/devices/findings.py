"""What the vendors' files look at for `erniekit doctor`: tools on PATH, packages, SDK folders, variables."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from erniekit.devices.base import Finding

NEVER_RUN = "written from public sources; never run by us on a card of this vendor"  # EVIDENCE of most files


def tool_finding(tool: str, absent: str, fix: str = "install the vendor's driver") -> Finding:
    path = shutil.which(tool)
    return Finding(True, f"{tool} is at {path}") if path else Finding(False, f"no {tool}: {absent}", fix)


def sdk_finding(folder: str, fix: str) -> Finding:
    there = Path(folder).is_dir()
    return Finding(there, f"{folder} is {'there' if there else 'not there'}", "" if there else fix)


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def visible_finding(variable: str) -> Finding:
    """A list of numbers without blanks: runtimes stop reading at the first other character."""
    listed = os.environ.get(variable)
    if listed is None:
        return Finding(True, f"{variable} is not set: all devices are used")
    bad = any(character.isspace() for character in listed)
    setting = f"{variable}={listed}"
    return Finding(not bad, setting + (" has blanks, at which the runtime stops reading" if bad else ""),
                   f"{variable}={''.join(listed.split())}" if bad else "")  # fmt: skip
