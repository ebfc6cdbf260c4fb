"""A YAML or JSON file -> top-level keys, each with its value and line. Safe on files one did not write.

Only plain data is read: no tags, no merges, no key twice, bounded size and node count. Called by sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.errors import ConfigError
from erniekit.files import refuse_special
from erniekit.registry import nearest

MAX_BYTES = 1_000_000
MAX_NODES = 100_000  # after aliases are followed: what a loader would have to build
MAX_DEPTH = 100


class FileEntry(NamedTuple):
    value: Any
    line: int  # 1-based
    text: str | None = None  # a YAML scalar as written: the key's type decides, not YAML's (`off`, `5e-7`, `1:1`)

    @property
    def given(self) -> Any:
        return self.value if self.text is None or self.value is None else self.text

    @property
    def plain(self) -> Any:
        """The value without line numbers, for keys that hold a mapping."""
        return {k: e.plain for k, e in self.value.items()} if isinstance(self.value, dict) else self.value


def read_file(name: str) -> dict[str, FileEntry]:
    """The top-level mapping of a config file. Values that are mappings hold `Entry` values themselves."""
    path = Path(name)
    refuse_special(path, ConfigError)
    try:
        with path.open("rb") as f:
            raw = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise _cannot_open(path, e) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than 1 MB", where=name, fix="a recipe is a few kilobytes: is this one?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name} is not UTF-8 text (byte {e.start})", where=name, fix="save it as UTF-8") from None
    try:
        return _read_json(text, name) if path.suffix == ".json" else _read_yaml(text, name)
    except RecursionError:
        raise _too_much(name) from None


def parse_value(text: str, where: str) -> Any:
    """A value typed on a command line, by YAML's rules: `[a, b]`, `{image: 1}`."""
    import yaml

    node = _compose(text, where)
    if node is None:
        return None
    _check(node, where)
    return _plain(yaml.SafeLoader(""), node, where)


def _cannot_open(path: Path, e: OSError) -> ConfigError:
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, sorted(p.name for p in folder.glob("*") if p.suffix in (".yaml", ".yml", ".json")))
    fix = f"did you mean {folder / near[0]}?" if near else "check the path"
    reason = "is a folder" if path.is_dir() else (e.strerror or "cannot be read").lower()
    return ConfigError(f"cannot read {path}: {reason}", where=str(path), fix=fix)


def _too_much(name: str) -> ConfigError:
    return ConfigError(
        f"{name} holds more than {MAX_NODES:,} values or nests too deeply",
        where=name,
        fix="a recipe is a flat list of keys: is this one?",
    )


def _duplicate(key: str, first: int, second: int, name: str) -> ConfigError:
    return ConfigError(
        f"key {key!r} is given twice", where=f"{name}:{first} and {name}:{second}", fix="keep one of the two lines"
    )


# ---- JSON


def _read_json(text: str, name: str) -> dict[str, FileEntry]:
    lines: dict[str, list[int]] = {}
    for m in re.finditer(r'"([^"\\]+)"\s*:', text):
        lines.setdefault(m.group(1), []).append(text.count("\n", 0, m.start()) + 1)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                first, second = [*lines.get(key, []), 0, 0][:2]
                raise _duplicate(key, first, second, name)
            out[key] = value
        return out

    try:
        data = json.loads(text, object_pairs_hook=pairs)
    except ValueError as e:
        line = getattr(e, "lineno", 1)
        raise ConfigError(f"not valid JSON: {e}", where=f"{name}:{line}", fix="correct the line") from None
    if not isinstance(data, dict):
        raise ConfigError("expected a mapping of keys to values", where=name, fix='{"key": value, ...}')
    return {key: FileEntry(_nest(value, lines), lines.get(key, [1])[0]) for key, value in data.items()}


def _nest(value: Any, lines: dict[str, list[int]]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: FileEntry(_nest(v, lines), lines.get(key, [1])[0]) for key, v in value.items()}


# ---- YAML


def _read_yaml(text: str, name: str) -> dict[str, FileEntry]:
    import yaml

    node = _compose(text, name)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            "expected lines of `key: value`", where=f"{name}:{node.start_mark.line + 1}", fix="key: value"
        )
    _check(node, name)
    return _entries(yaml.SafeLoader(""), node, name)


_UNFINISHED = ("a simple key", "a quoted scalar", "a flow sequence", "a flow mapping")
_KEY = re.compile(r"\s*[\w.-]+\s*:(\s|$)")


def _begins_another(text: str, mark: Any) -> bool:
    """Whether the line of an error is behind what it is about: the next key, or the end."""
    lines = text.splitlines()
    return mark is None or mark.line >= len(lines) or bool(_KEY.match(lines[mark.line]))


def _compose(text: str, name: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=loader):  # compose() recurses: depth must be known before
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _too_much(name)
        return yaml.compose(text, Loader=loader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        if str(getattr(e, "context", "")).endswith(_UNFINISHED) and _begins_another(text, mark):
            mark = getattr(e, "context_mark", mark)  # what was not finished
        where = f"{name}:{mark.line + 1}" if mark and not name.startswith(("flag", "key=")) else name
        problem = getattr(e, "problem", None) or getattr(e, "reason", None) or "unreadable"
        raise ConfigError(f"not valid YAML: {problem}", where=where, fix="correct the line") from None


def _check(root: Any, name: str) -> None:
    """Refuse what a flat recipe never holds, before anything is built from it."""
    import yaml

    plain = {f"tag:yaml.org,2002:{t}" for t in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")}
    seen = 0

    def visit(node: Any, depth: int) -> None:
        nonlocal seen
        seen += 1
        if seen > MAX_NODES or depth > MAX_DEPTH:
            raise _too_much(name)
        if node.tag not in plain:
            where = f"{name}:{node.start_mark.line + 1}"
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise ConfigError(f"YAML tag {tag} is refused", where=where, fix="write plain values: text, numbers, lists")
        if isinstance(node, yaml.MappingNode):
            for k, v in node.value:
                visit(k, depth + 1)
                visit(v, depth + 1)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                visit(item, depth + 1)

    visit(root, 0)


def _pairs(node: Any, name: str) -> Iterator[tuple[str, Any, int]]:
    first: dict[str, int] = {}
    for k, v in node.value:
        line = k.start_mark.line + 1
        if not isinstance(k.value, str):
            raise ConfigError("a key must be a name", where=f"{name}:{line}", fix="key: value")
        if k.value in first:
            raise _duplicate(k.value, first[k.value], line, name)
        first[k.value] = line
        yield k.value, v, line


def _entries(loader: Any, node: Any, name: str) -> dict[str, FileEntry]:
    return {
        key: FileEntry(_value(loader, v, name, _entries), line, v.value if isinstance(v.value, str) else None)
        for key, v, line in _pairs(node, name)
    }


def _plain(loader: Any, node: Any, name: str) -> Any:
    return _value(loader, node, name, lambda lo, n, na: {key: _plain(lo, v, na) for key, v, _ in _pairs(n, na)})


def _value(loader: Any, node: Any, name: str, mapping: Callable[[Any, Any, str], Any]) -> Any:
    import yaml

    if isinstance(node, yaml.MappingNode):
        return mapping(loader, node, name)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, name) for item in node.value]
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError, OverflowError):  # e.g. a date that is none: its text
        return node.value
