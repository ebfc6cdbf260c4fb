"""Values by key -> the lines of a recipe, in the order the keys are declared. For `migrate` and `recipes --flat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.config.flat import KEYS


def recipe_lines(values: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    section = ""
    for name, k in KEYS.items():
        if name in values and not k.secret:
            if section and k.section != section:
                lines.append("")
            section = k.section
            lines.append(f"{name}: {_text(values[name])}")
    return lines


def _text(value: Any) -> str:
    import yaml

    if isinstance(value, bool):
        return str(value)
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str) and value[0].isidentifier():
        return value[0]
    plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
    text = str(yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000))
    return text.removesuffix("\n").removesuffix("\n...")
