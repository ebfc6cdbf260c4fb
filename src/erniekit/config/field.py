"""key(): one declaration that yields the YAML key, the --flag, its type, its help text and its rules.

The sections are made of these; conversion, sources, help and the config command read them back as `Key`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from erniekit.registry import Registry

# How a value names files. `one`: a file or folder that is read; `out`: a folder that is written; `model`: a folder or a
# hub id; `several`: a list of paths; `named`: a list of name=path; `prefixes`: a prefix of token files, a folder of
# them, or weight prefix weight prefix; `prefix_list`: prefixes, comma-separated or in a file; `numbers`: numbers,
# comma-separated or in a file.
PathKind = Literal["", "one", "out", "model", "several", "named", "prefixes", "prefix_list", "numbers"]


@dataclass(frozen=True)
class Key:
    """What is known about one flat key. `kind` is the annotation without `| None`, e.g. `tuple[int, ...]`."""

    name: str
    section: str
    kind: str
    optional: bool
    default: Any
    help: str
    also: tuple[str, ...] = ()  # other names it is known by
    choices: tuple[str, ...] = ()  # of the value, or of each item of a list
    further: Registry | None = None  # what installed packages may add to the choices
    low: float | None = None
    high: float | None = None
    commas: bool = False  # text becomes a list at commas only, so that its items may hold spaces (paths)
    basic: bool = False  # shown by the short help
    fixed: bool = False  # must not change when a run resumes: it decides what the next step does
    not_yet: str = ""  # the capability that will read it; empty when it is read today
    secret: bool = False  # never printed or stored
    path: PathKind = ""  # how its value names files; the web page keeps all of them inside its folders
    idle: Mapping[str, str] = field(default_factory=dict)  # values of it that change nothing here -> why
    elsewhere: Callable[[str], str | None] | None = None  # a value it does not take -> what to write instead
    example: str = ""  # a value that an error proposes; the default if it is a good one
    names: tuple[str, ...] = ()  # of a list of name=value: behind its flag also where such a name is a key

    @property
    def is_list(self) -> bool:
        return self.kind.startswith("tuple")

    @property
    def item(self) -> str:
        """The kind of one value: of the key itself, or of each item of a list."""
        return self.kind[6:].partition(",")[0] if self.is_list else self.kind


def key(
    default: Any,
    help: str,
    *,
    also: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    further: Registry | None = None,
    low: float | None = None,
    high: float | None = None,
    commas: bool = False,
    basic: bool = False,
    fixed: bool = False,
    not_yet: str = "",
    secret: bool = False,
    path: PathKind = "",
    idle: Mapping[str, str] | None = None,
    elsewhere: Callable[[str], str | None] | None = None,
    example: str = "",
    names: tuple[str, ...] = (),
) -> Any:
    idle = idle or {}
    facts = dict(
        help=help, also=also, choices=(*choices, *idle), further=further, low=low, high=high, commas=commas,
        basic=basic, fixed=fixed, not_yet=not_yet, secret=secret, path=path, idle=idle, elsewhere=elsewhere,
        example=example, names=names,
    )  # fmt: skip
    return field(default=default, metadata=facts)


def keys_of(section: str, cls: type) -> list[Key]:
    """The keys a section declares, in the order it declares them."""
    out = []
    for f in fields(cls):
        if f.default is MISSING or not isinstance(f.type, str):
            raise TypeError(f"{cls.__name__}.{f.name} must be declared with key() under postponed annotations")
        kind, _, none = f.type.partition(" | ")
        out.append(Key(f.name, section, kind, none == "None", f.default, **f.metadata))
    return out
