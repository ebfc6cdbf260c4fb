"""Which columns of a file hold which fields: the recipe's `columns`, checked, and applied to a row.

config/ gives the mapping as it was written; files.py applies it to every row it decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.errors import ConfigError
from erniekit.registry import nearest

Columns = tuple[tuple[str, str], ...]  # (field, column)

# Every field that some format reads.
FIELDS = (
    "prompt", "completion", "response", "question", "query", "answer", "instruction", "input", "context", "output",
    "system", "history", "messages", "conversations", "tools", "chosen", "rejected", "score_delta", "src", "tgt",
    "sort", "label", "kto_tag", "margin", "is_system", "tool_calls", "reasoning_content", "reasoning", "thinking",
    "text",
)  # fmt: skip
COVERED = "{} (of the file)"  # a column whose name another column was given


def as_columns(given: Mapping[str, Any] | None, where: str = "columns") -> Columns:
    """ConfigError for a field that no format reads, and for two fields of one column."""
    out: list[tuple[str, str]] = []
    for field, column in (given or {}).items():
        if field not in FIELDS:
            before, colon, after = str(field).partition(":")
            if colon and before in FIELDS:  # YAML takes `prompt:q` for one word
                fix = f"put a blank behind the colon, or write columns.{before}={after.strip() or 'COLUMN'}"
                raise ConfigError(f"columns has no field {str(field)!r}", where=where, fix=fix)
            near = nearest(str(field), list(FIELDS))
            raise ConfigError(
                f"columns has no field {str(field)!r}",
                where=where,
                fix=f"did you mean {near[0]}?" if near else "fields are " + ", ".join(FIELDS),
            )
        if not isinstance(column, str) or not column:
            raise ConfigError(
                f"columns gives {field} no name of a column", where=where, fix="columns: {prompt: q, response: a}"
            )
        out.append((field, column))
    return tuple(out)


def renamed(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The row with its columns under the names of the fields they hold; its type is kept."""
    taken = {column for _, column in columns}
    fields = {field: row[column] for field, column in columns if column in row}
    rest = {COVERED.format(name) if name in fields else name: value for name, value in row.items() if name not in taken}
    return type(row)({**rest, **fields})


def only_mapped(row: Any, columns: Columns) -> Any:
    """The fields that `columns` names, of a row in which they have their names."""
    return {field: row[field] for field, _ in columns if field in row} if columns and isinstance(row, dict) else None
