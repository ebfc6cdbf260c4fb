"""A vendor's Triton that imports, decorates, and cannot compile a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "3.0.0+hostile"


class Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            raise RuntimeError("hostilecc: internal compiler error: unsupported target")

        return launch


def jit(function: Callable[..., Any]) -> Kernel:
    return Kernel(function)
