"""Whether another distribution called `erniekit` shares our import name, and what to do about it. Called by cli/main.py
at every start, so the usual case lists sys.path and imports nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.errors import ErnieKitError
from erniekit.extras import PROJECT
from erniekit.log import warn

if TYPE_CHECKING:
    from importlib.metadata import Distribution

OUR_ENTRY = "erniekit.cli.main:main"  # the console script's; no other project has it


def check_installation() -> None:
    """Warn of another `erniekit`; refuse to run when it has replaced files of ours: the rest would be a mixture."""
    for folder in _called_erniekit(sys.path):
        from importlib.metadata import Distribution

        other = Distribution.at(folder)
        if any(entry.value == OUR_ENTRY for entry in other.entry_points):
            _warn_of(
                f"this project is also installed under its earlier name, erniekit {other.version}",
                folder,
                f"pip uninstall erniekit; {_reinstall(other)}",
            )
            continue
        fix = f"pip uninstall erniekit; {_reinstall(_own())}"
        if replaced := _replaced(other):
            raise ErnieKitError(
                f"the package erniekit {other.version}, another project's, has replaced {len(replaced)} of our files: "
                f"{replaced[0]}" + (" ..." if len(replaced) > 1 else ""),
                where=str(folder),
                fix=fix,
            )
        _warn_of(f"the package erniekit {other.version} is another project's and shares our import name", folder, fix)


def _called_erniekit(places: list[str]) -> list[Path]:
    """Metadata folders of installed distributions of that name; `erniekit_torch-0.1.0.dist-info` has another one."""
    found = {}
    for place in dict.fromkeys(places):
        try:
            names = os.listdir(place or ".")
        except OSError:  # a zip file, or a folder that is no more
            continue
        for name in names:
            if name.endswith(".dist-info") and name.partition("-")[0].lower() == "erniekit":
                found[os.path.realpath(Path(place, name))] = Path(place, name)
    return list(found.values())


def _own() -> Distribution | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(PROJECT)
    except PackageNotFoundError:  # run from a source tree
        return None


def _replaced(other: Distribution) -> list[str]:
    """Files of our package that the other one lists and that are no longer what we installed."""
    import base64
    import hashlib

    here = Path(__file__).resolve().parents[1]
    own = _own()
    try:
        other_files = {Path(str(file.locate())).resolve() for file in other.files or ()}
    except (ValueError, TypeError, IndexError):  # a list of files that cannot be read names none of ours
        return []
    out = []
    for file in (own.files if own else None) or ():
        path = Path(str(file.locate())).resolve()
        if path not in other_files or here not in path.parents or file.hash is None:
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes() if path.is_file() else b"").digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
            out.append(str(file))
    return out


def _reinstall(installed: Distribution | None) -> str:
    """The command that puts our files back: from where they came, without touching torch."""
    import json

    direct_url = json.loads((installed.read_text("direct_url.json") if installed else None) or "{}")
    url = str(direct_url.get("url", ""))
    source = url.removeprefix("file://") or PROJECT
    editable = "-e " if direct_url.get("dir_info", {}).get("editable") else ""
    return f"pip install --force-reinstall --no-deps {editable}{source}"


def _warn_of(what: str, folder: Path, fix: str) -> None:
    warn(f"{what}\nwhere: {folder}\nfix:   {fix}")
