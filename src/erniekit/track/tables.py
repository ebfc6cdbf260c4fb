"""Plain values of run.json (dicts, lists, numbers, text) as escaped HTML tables. Used by report.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

BRIEF = 26  # characters of a text that is not broken over lines: a name, a time
MAX_ROWS = 300  # of one list; the file behind the page has the rest


def value_html(value: Any) -> str:
    """Any JSON value: a dict as name and value rows, a list of dicts as a table, the rest as text."""
    if isinstance(value, Mapping):
        rows = (f'<tr><td class="name">{escape(str(key))}</td>{_cell(item)}</tr>' for key, item in value.items())
        return f"<table><tbody>{''.join(rows)}</tbody></table>" if value else ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _list_html(list(value))
    return _text(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Columns given or, without them, every key met; those given stand first."""
    if not rows:
        return ""
    met = dict.fromkeys([*columns, *(key for row in rows for key in row)])
    names = [name for name in met if any(name in row for row in rows)]
    head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    body = "".join("<tr>" + "".join(_cell(row.get(name, "")) for name in names) + "</tr>" for row in rows[:MAX_ROWS])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{_left_out(len(rows))}"


def config_table(config: Sequence[Mapping[str, Any]]) -> str:
    """Key, value, origin; what was set or derived first. The filter above it works on the rows' text."""
    rows = sorted(config, key=_is_default)
    body = "".join(
        f"<tr{' class=default' if _is_default(row) else ''}>"
        f"<td><code>{escape(str(row.get('key', '')))}</code></td>"
        f"<td><code>{escape(_literal(row.get('value')))}</code></td>"
        f"<td>{escape(str(row.get('origin', '')))}</td></tr>"
        for row in rows
    )
    only = "" if all(map(_is_default, rows)) else " checked"
    return (
        '<div class="filter"><input type="search" id="search" placeholder="Find a key, a value or an origin" '
        'aria-label="Find in the configuration">'
        f'<label><input type="checkbox" id="only"{only}> only what is not a default</label>'
        f'<span class="muted" id="shown">{len(rows)} keys</span></div>'
        '<div class="card"><table id="config">'
        "<thead><tr><th>key</th><th>value</th><th>origin</th></tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_default(row: Mapping[str, Any]) -> bool:
    return str(row.get("origin", "")).startswith("default")


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _list_html(items: list[Any]) -> str:
    if items and all(isinstance(item, Mapping) for item in items):
        return table(items)
    if all(isinstance(item, int | float) for item in items):
        return escape(", ".join(map(_scalar, items[:MAX_ROWS]))) + _left_out(len(items))
    lines = "".join(f"<div>{value_html(item)}</div>" for item in items[:MAX_ROWS])
    return lines + _left_out(len(items))


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value_html(value)}</td>'
    if isinstance(value, Mapping) and value and all(_is_brief(item) for item in value.values()):
        return f"<td>{_pairs(value)}</td>"
    brief = isinstance(value, str) and len(value) <= BRIEF
    return f"<td{' class=brief' if brief else ''}>{value_html(value)}</td>"


def _is_brief(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= BRIEF)


def _pairs(values: Mapping[str, Any]) -> str:
    """A small dict inside a table: name and value side by side, not one more table."""
    spans = (f"<span><i>{escape(str(key))}</i>{escape(_scalar(item))}</span>" for key, item in values.items())
    return f'<div class="pairs">{"".join(spans)}</div>'


def _text(value: Any) -> str:
    text = escape(_scalar(value))
    return f"<pre>{text}</pre>" if "\n" in text else text


def _scalar(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _left_out(count: int) -> str:
    return f"<p class=note>{count - MAX_ROWS} more are left out here.</p>" if count > MAX_ROWS else ""
