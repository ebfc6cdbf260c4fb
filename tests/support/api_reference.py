"""docs/api-reference.md out of the docstrings. `python tests/support/api_reference.py` writes it; a test compares it.

Every public name has a docstring: `missing()` lists those that do not.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api-reference.md"
HEAD = """# Python reference

Made from the docstrings by `tests/support/api_reference.py`. [Python](python-api.md) shows them in use.
`erniekit.NAME` is imported when it is first used, and `dir(erniekit)` lists the names.
"""
# What is met through the names above, and not made by its user.
MET = {
    "MetricsTable": "erniekit.api.run_folder",
    "Plot": "erniekit.api.run_folder",
    "TextTokenizer": "erniekit.api.tokenizer",
    "Encoding": "erniekit.api.tokenizer",
    "TrainingLoop": "erniekit.train.hooks",
    "RunInfo": "erniekit.track.base",
    "RunResult": "erniekit.result",
    "InstalledPlugin": "erniekit.api.installed",
}
# Of TrainingLoop and of classes that inherit much, what a user is meant to use.
ONLY = {
    "TrainingLoop": ("model", "stop"),
    "TextTokenizer": (
        "__call__", "apply_chat_template", "batch_decode", "convert_ids_to_tokens", "decode", "encode",
    ),
    "ErnieKitError": ("lines",),
}  # fmt: skip
CALLED = ("__call__",)


def found(names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    from importlib import import_module

    return ((name, getattr(import_module(module), name)) for name, module in names.items())


def members(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """What a class itself defines and offers, in the order of its source."""
    for member, value in vars(cls).items():
        wanted = member in ONLY[name] if name in ONLY else not member.startswith("_") or member in CALLED
        if wanted and (callable(value) or isinstance(value, property) or hasattr(value, "func")):
            yield member, value


def function_of(value: Any) -> Any:
    """Behind a property or a class method."""
    return getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", None) or value


def documented() -> Iterator[tuple[str, Any]]:
    from erniekit.api import NAMES

    for name, thing in [*found(NAMES), *found(MET)]:
        yield name, thing
        if inspect.isclass(thing):
            for member, value in members(name, thing):
                yield f"{name}.{member}", function_of(value)


def missing() -> list[str]:
    return [name for name, thing in documented() if not (inspect.getdoc(thing) or "").strip()]


def fields_of(cls: type) -> Iterator[str]:
    """A dataclass's fields, each with the comment behind it."""
    source = inspect.getsource(cls)
    for one in dataclasses.fields(cls):
        line = re.search(rf"^    {one.name}: .*$", source, re.MULTILINE)
        comment = line[0].partition("  # ")[2] if line else ""
        yield f"- `{one.name}`: {one.type}" + (f". {comment[0].upper()}{comment[1:]}" if comment else "")


def signature(name: str, thing: Any) -> str:
    made = inspect.signature(thing)
    shown = [p.replace(annotation=p.empty) for p in made.parameters.values() if p.name != "self"]
    text = f"{name}{made.replace(parameters=shown, return_annotation=made.empty)}"
    return "\n".join(textwrap.wrap(text, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


def text_of(thing: Any) -> str:
    """Its docstring; lines that begin with the names of parameters become a list."""
    lines, listed = [], False
    for line in (inspect.getdoc(thing) or "").splitlines():
        parameter = re.fullmatch(r"([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        if parameter:
            names = ", ".join(f"`{word}`" for word in parameter[1].split(", "))
            lines.append(f"- {names}: {parameter[2]}")
        else:
            lines.append(f"  {line.strip()}" if listed and line.startswith("    ") else line)
        listed = bool(parameter) or (listed and line.startswith("    "))
    return "\n".join(lines)


def entry(name: str, thing: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if not inspect.isclass(thing):
        yield f"```text\n{signature(f'erniekit.{name}', thing)}\n```\n"
    yield f"{text_of(thing)}\n"
    if not inspect.isclass(thing):
        return
    if dataclasses.is_dataclass(thing):
        yield "\n".join(fields_of(thing)) + "\n"
    for member, value in members(name, thing):
        function = function_of(value)
        if function is value:
            shown = signature(name.lower() if member in CALLED else member, function)
        else:
            shown = member
        yield f"### {name}.{member}\n\n```text\n{shown}\n```\n\n{text_of(function)}\n"


def render() -> str:
    from erniekit.api import NAMES

    parts = [HEAD]
    for title, names in (("", NAMES), ("# Returned objects\n", MET)):
        parts += [title] if title else []
        for name, thing in found(names):
            parts += entry(name, thing)
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
