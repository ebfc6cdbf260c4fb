"""What the CLI does, a notebook can: run(command, recipe, key=value, ...) and load(folder)."""

from __future__ import annotations

from erniekit.api_load import load
from erniekit.recipes.run import run

__all__ = ["load", "run"]
