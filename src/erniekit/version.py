"""The version, below everything that names it: the package itself offers run() and load(), which import all rooms."""

from __future__ import annotations

__version__ = "0.1.0"
