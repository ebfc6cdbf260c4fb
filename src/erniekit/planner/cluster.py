"""A cluster from a text or a file: `8x80G`, `2x8xH200-141G`, `16xBI150-32G`, or a YAML of unlike islands. No torch.

Called by recipes/plan_command.py. An island is a number of like machines whose devices share one collective library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigError
from erniekit.planner.cards import ALSO, BY_MEMORY, CARDS, GIB, Card
from erniekit.registry import nearest

PER_MACHINE = 8
MOST = 100_000  # devices that are planned: more than any job has, and layouts are still counted in seconds
MOST_GIB = 10_000  # of a device
FIX = "write 8x80G, 2x8xH200-141G, 16xBI150-32G, 128xAscend-64G, or the name of a YAML file"
# Of a memory that a seller rounds up: what torch reports of a card sold as so many GB.
SOLD = {141: 139.8, 80: 79.3, 40: 39.4, 48: 44.5, 24: 23.6, 32: 32.0, 64: 64.0, 96: 95.6, 192: 191.5}


@dataclass(frozen=True)
class Island:
    card: Card
    machines: int
    devices: int  # of one machine

    @property
    def size(self) -> int:
        return self.machines * self.devices

    def describe(self) -> str:
        count = f"{self.machines} x {self.devices}" if self.machines > 1 else f"{self.devices}"
        name = self.card.name if self.card.name[:1].isalpha() else f"cards ({self.card.name})"  # 80G: by memory alone
        return f"{count} {name} of {self.card.memory / GIB:.0f} GiB"


@dataclass(frozen=True)
class Cluster:
    islands: tuple[Island, ...]
    text: str = ""
    between: float = 12.5e9  # bytes a second between islands

    @property
    def size(self) -> int:
        return sum(island.size for island in self.islands)

    def describe(self) -> str:
        return " + ".join(island.describe() for island in self.islands)


def parse(text: str) -> Cluster:
    path = Path(text).expanduser()
    is_file = path.suffix in (".yaml", ".yml")
    cluster = _from_file(path) if is_file else Cluster((island_of(text),), text)
    if cluster.size > MOST:
        what = f"{cluster.size:,} devices are beyond what is planned: {MOST:,}"
        raise ConfigError(what, where=f"--cluster {text}", fix="give fewer machines; one job does not span more")
    return cluster


def island_of(text: str, where: str = "--cluster") -> Island:
    found = re.fullmatch(r"(?:(\d{1,9})x)?(\d{1,9})x(.+)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{text!r} is not a cluster", where=where, fix=FIX)
    machines, devices, kind = int(found[1] or 0), int(found[2]), found[3]
    if not devices or found[1] == "0":
        raise ConfigError(f"{text!r} has no devices", where=where, fix=FIX)
    card = card_of(kind, where, text.strip()[: found.start(3)])
    if not machines:  # one number: machines of eight where it comes out even
        whole = devices > PER_MACHINE and devices % PER_MACHINE == 0
        machines, devices = (devices // PER_MACHINE, PER_MACHINE) if whole else (1, devices)
    return Island(card, machines, devices)


def card_of(text: str, where: str = "--cluster", before: str = "") -> Card:
    """`H200-141G`, `H200`, `80G`. before: what stands before it, as in 8x."""
    name, _, size = text.strip().rpartition("-")
    memory = _gib(size)
    if memory is None:
        name, memory = text.strip(), None
    if not name and (memory is None or "-" in text):
        raise ConfigError(f"{text!r} is not a card", where=where, fix=FIX)
    if not name:
        assert memory is not None
        card_name = next(card for most, card in BY_MEMORY if memory <= most)
        return replace(CARDS[card_name], name=f"{memory:g}G", memory=SOLD.get(int(memory), memory) * GIB)
    key = ALSO.get(name.lower(), name.lower())
    if key not in CARDS and (number := re.match(r"\d+(\.\d+)?", name)):
        outside = not 0 < float(number[0]) <= MOST_GIB
        what = (
            f"no memory of a card: more than 0 and at most {MOST_GIB:,} GiB"
            if outside
            else "neither a memory nor a card"
        )
        fix = f"did you mean {before}{number[0]}G?" if _gib(f"{number[0]}G") else FIX
        raise ConfigError(f"{text[:40]!r} is {what}", where=where, fix=fix)
    if key not in CARDS:
        near = nearest(key, list(CARDS))
        listed = ", ".join(card.name for card in CARDS.values())
        fix = f"give its memory alone, {before}{size if memory else '80G'}, or one of: {listed}"
        fix = f"did you mean {before}{CARDS[near[0]].name}? Otherwise {fix}" if near else fix
        raise ConfigError(f"no data sheet of a card {name!r}", where=where, fix=fix)
    card = CARDS[key]
    return card if memory is None else replace(card, memory=SOLD.get(int(memory), memory) * GIB)


def _gib(text: str) -> float | None:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(?:G|GB|GiB)", text, re.IGNORECASE)
    return float(found[1]) if found and 0 < float(found[1]) <= MOST_GIB else None


# Keys of an island in a file, besides those of Card: their units are what data sheets print.
_UNITS = {"memory_gib": ("memory", GIB), "tflops": ("flops", 1e12), "bandwidth_gb": ("bandwidth", 1e9),
          "link_gb": ("link", 1e9), "network_gb": ("network", 1e9)}  # fmt: skip


def _from_file(path: Path) -> Cluster:
    import yaml

    if not path.is_file():
        raise ConfigError(f"no file {path}", where="--cluster", fix=FIX)
    try:
        read: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"not a YAML file: {first}", where=str(path), fix="see docs/planner.md") from None
    islands = read.get("islands") if isinstance(read, dict) else None
    if not isinstance(islands, list) or not islands:
        fix = "islands: [{card: H200-141G, machines: 1, devices: 8}, ...]"
        raise ConfigError("it lists no islands", where=str(path), fix=fix)
    strange = sorted(str(key) for key in read if key not in ("islands", "between_gb"))
    if strange:
        raise ConfigError(f"unknown {strange[0]!r}", where=str(path), fix="known: islands, between_gb")
    between = read.get("between_gb", 12.5)
    if not isinstance(between, int | float) or isinstance(between, bool) or not 0 < between < 1e9:
        raise ConfigError(f"between_gb is {between!r}", where=str(path), fix="GB a second between islands, above 0")
    made = tuple(_island(entry, f"{path}: islands[{k}]") for k, entry in enumerate(islands))
    return Cluster(made, str(path), between * 1e9)


def _island(entry: Any, where: str) -> Island:
    if isinstance(entry, str):
        return island_of(entry, where)
    if not isinstance(entry, dict) or not isinstance(entry.get("card"), str):
        raise ConfigError("an island has a card", where=where, fix="card: H200-141G, machines: 1, devices: 8")
    numbers = {}
    for key, default in (("machines", 1), ("devices", PER_MACHINE), *((unit, None) for unit in _UNITS)):
        value = entry.get(key, default)
        whole = key in ("machines", "devices")
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if value is not None and not (right and 0 < value < 1e9):  # YAML also has .nan and .inf
            raise ConfigError(
                f"{key} is {value!r}", where=where, fix=f"{key}: a {'whole ' if whole else ''}number above 0"
            )
        numbers[key] = value
    strange = sorted(set(entry) - {"card", "machines", "devices", *_UNITS})
    if strange:
        allowed = ", ".join(("card", "machines", "devices", *_UNITS))
        raise ConfigError(f"unknown {strange[0]!r}", where=where, fix=f"known: {allowed}")
    card = card_of(entry["card"], where)
    card = replace(card, **{_UNITS[k][0]: v * _UNITS[k][1] for k, v in numbers.items() if k in _UNITS and v})
    return Island(card, int(entry.get("machines", 1)), int(entry.get("devices", PER_MACHINE)))
