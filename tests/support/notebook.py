"""Runs a notebook's code cells in this process, in order and in one namespace, as Jupyter does, and prints what it
would show. `python notebook.py FILE`; ends with the error of the first cell that fails."""

from __future__ import annotations

import ast
import json
import sys
from typing import Any

SHOWN = ("_repr_html_", "_repr_svg_")


def run(path: str) -> None:
    # Jupyter's code runs inside an event loop; what cannot is found here.
    import asyncio

    async def cells() -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        with open(path, encoding="utf-8") as file:
            for number, cell in enumerate(json.load(file)["cells"]):
                if cell["cell_type"] == "code":
                    show(run_cell("".join(cell["source"]), f"cell {number}", names))

    asyncio.run(cells())


def run_cell(text: str, name: str, names: dict[str, Any]) -> Any:
    """The value of its last line, if that is an expression."""
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if isinstance(last, ast.Expr) else None


def show(value: Any) -> None:
    if value is not None:
        print("shown:", next((getattr(value, way)() for way in SHOWN if hasattr(value, way)), repr(value)))


if __name__ == "__main__":
    run(sys.argv[1])
