"""erniekit: train, compress, export and serve ERNIE-4.5 and Llama class models. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erniekit.version import __version__

__all__ = ["__version__", "load", "run"]

if TYPE_CHECKING:
    from erniekit.api import load, run


def __getattr__(name: str) -> Any:
    if name in ("run", "load"):
        from erniekit import api

        return getattr(api, name)
    raise AttributeError(f"module 'erniekit' has no attribute {name!r}")
