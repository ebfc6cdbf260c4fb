"""A plan as a person reads it, and as a program does. Called by recipes/plan_command.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from erniekit.planner.cards import CardRates
from erniekit.planner.evaluate import Candidate
from erniekit.planner.memory import GIB
from erniekit.planner.search import Ranking
from erniekit.printable import counted

SHOWN = 8
FAMILIES = 8


def table(ranked: Sequence[Candidate], shown: int = SHOWN) -> list[str]:
    """The fastest first."""
    width = max([56, *(len(one.layout.describe()) for one in ranked[:shown])]) + 2
    head = (
        f"{'':<3}{'layout':<{width}}{'tokens/s':>10}{'step s':>9}{'waits':>7}{'bubble':>8}{'GiB':>6}{'worst':>7}  again"
    )
    out = [head]
    for number, one in enumerate(ranked[:shown], 1):
        out.append(
            f"{number:<3}{one.layout.describe():<{width}}{_count(one.tokens):>10}{one.seconds:>9.2f}"
            f"{one.waits:>7.0%}{one.bubble:>8.0%}{one.most.total / GIB:>6.0f}{one.worst / GIB:>7.0f}  "
            f"{len(one.again) or '-'}"
        )
    if len(ranked) > shown:
        out.append(f"   and {len(ranked) - shown} more that fit")
    return out


def _count(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.1f}"


def bytes_table(one: Candidate) -> list[str]:
    """GiB of the fullest rank of each pipeline rank; like neighbours share a line."""
    names = [name for name in one.stages[0].shown()]
    out = ["GiB of a rank" + " " * 5 + "".join(f"{name:>15}" for name in names)]
    groups: list[tuple[int, int]] = []
    for k, stage in enumerate(one.stages):
        if groups and abs(one.stages[groups[-1][0]].total - stage.total) < 0.01 * stage.total:
            groups[-1] = (groups[-1][0], k)
        else:
            groups.append((k, k))
    for first, last in groups:
        label = f"stage {first}" if first == last else f"stages {first} to {last}"
        out.append(f"{label:<18}" + "".join(f"{v:>15.2f}" for v in one.stages[first].shown().values()))
    return out


def rejected(found: Ranking, shown: int = FAMILIES) -> list[str]:
    out = [f"{name}: {counted(count, 'layout')}; {why}" for name, (count, why) in list(found.failed.items())[:shown]]
    more = len(found.failed) - shown
    return out + ([f"and {counted(more, 'more kind')}"] if more > 0 else [])


def sources(rates: CardRates) -> str:
    """Which rates were measured and which are a vendor's."""
    kinds: dict[str, list[str]] = {}
    for name, source in rates.source.items():
        kinds.setdefault(source, []).append(name)
    return "; ".join(f"{source}: {', '.join(names)}" for source, names in kinds.items())


def lever_lines(rows: Iterable[tuple[dict[str, Any], float | None, float, str]]) -> list[str]:
    """(keys, tokens a second or None where it does not fit, GiB, what it loses)."""
    out = []
    for keys, tokens, gib, loses in rows:
        settings = ", ".join(f"{key}: {value}" for key, value in keys.items())
        speed = "does not fit" if tokens is None else f"{_count(tokens)} tokens/s"
        out.append(f"{settings:<46} {gib:>6.1f} GiB  {speed:<18} costs {loses}")
    return out


def as_json(one: Candidate) -> dict[str, Any]:
    return {
        "layout": one.layout.describe(),
        "keys": one.keys,
        "tokens_per_second": one.tokens,
        "step_seconds": one.seconds,
        "bubble": one.bubble,
        "waits": one.waits,
        "pipeline": "replayed" if one.exact else "estimated",
        "recomputed_layers": list(one.again),
        "gib_by_stage": [stage.shown() for stage in one.stages],
        "gib_worst_routing": one.worst / GIB,
        "gib_in_host": one.away / GIB,
        "problem": one.problem,
    }
