"""Distributions as pip leaves them, for tests of entry points. Used by tests/unit/api."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, entries: dict[str, str], **modules: str) -> None:
    """A distribution as pip leaves it: its modules, and a dist-info folder."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[erniekit.{group}]\n{line}\n" for group, line in entries.items()))
