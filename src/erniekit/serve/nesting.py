"""How deep a JSON value of a request nests. Used by gate.py and asked.py."""

from __future__ import annotations

from typing import Any

DEPTH = 64


def nests_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            item
            for holder in level
            if isinstance(holder, (dict, list))
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True
