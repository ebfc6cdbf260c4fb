"""A vendor's Triton that imports, decorates, and cannot compile a kernel: the installed one, with its launch replaced
for the whole process by what such a build does."""

from __future__ import annotations

from typing import Any


def break_triton() -> None:
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **options: Any) -> Any:
        raise RuntimeError("hostilecc: internal compiler error: unsupported target")

    JITFunction.run = run
