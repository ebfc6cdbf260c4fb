"""`erniekit rehearse ... --timeline FILE`: when each rank of a step computes, transfers and waits, as numbers and as a
picture. Called by rehearse_command.py. StepRates are the planner's, of the card that --cluster names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigError
from erniekit.log import emit
from erniekit.planner.cards import CARDS, CardRates, rates_of
from erniekit.planner.cluster import PER_MACHINE, Cluster, Island, parse
from erniekit.printable import counted
from erniekit.recipes.plan_timeline import TERMINAL, timeline_target, write_picture
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.moments import CountedWork
from erniekit.rehearse.timeline_picture import as_svg, as_text
from erniekit.rehearse.timing import RankTimes, slowest, timed

OPTIONS = ("--timeline", "--cluster")
CARD = "h200"  # where none is named
SHOWN = 16  # ranks of a picture


@dataclass(frozen=True)
class Wanted:
    target: str | Path  # a file, or `-`
    cluster: Cluster | None = None  # None: as many of CARD as there are ranks


def options(args: list[str]) -> tuple[list[str], Wanted | None]:
    """(the other words, what --timeline and --cluster ask for)."""
    words: list[str] = []
    given: dict[str, str] = {}
    rest = iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            words.append(word)
            continue
        given[name] = value if equals else next(rest, "")
        if not given[name]:
            raise ConfigError(f"{name} has no value", where="erniekit rehearse", fix="erniekit rehearse --help")
    if "--timeline" not in given:
        if given:
            what = "--cluster only says how fast a timeline is"
            raise ConfigError(what, where="erniekit rehearse", fix="add --timeline step.svg, or - to print it")
        return words, None
    target = timeline_target(given["--timeline"])
    assert target is not None
    return words, Wanted(target, parse(given["--cluster"]) if "--cluster" in given else None)


def placed(wanted: Wanted, ranks: int) -> Cluster:
    """The cluster that the ranks are on, one device each, in order."""
    if wanted.cluster is None:
        return Cluster((Island(CARDS[CARD], -(-ranks // PER_MACHINE), min(ranks, PER_MACHINE)),))
    cluster = wanted.cluster
    where = f"--cluster {cluster.text}"
    if cluster.size < ranks:
        what = f"the run has {counted(ranks, 'rank')}, and the cluster {counted(cluster.size, 'device')}"
        raise ConfigError(what, where=where, fix=f"a cluster of {ranks} devices, or --ranks {cluster.size}")
    for island in cluster.islands:
        if not island.card.overlaps:
            what = f"nothing overlaps on {island.card.name}: transfers take the cores that compute"
            raise ConfigError(what, where=where, fix="name a card, such as 8xH200")
    return cluster


class ClusterRates:
    """rehearse/timing.py's StepRates."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rates = [rates_of(island.card) for island in cluster.islands]
        self.latency = max(rates.latency for rates in self.rates)
        self.link = cache(self._link)

    def seconds(self, rank: int, work: CountedWork) -> float:
        return seconds(work, self.rates[self._place(rank)[0]])

    def _link(self, members: Sequence[int]) -> float:
        places = {self._place(rank) for rank in members}
        islands = {island for island, _ in places}
        if len(islands) > 1:
            return self.cluster.between
        rates = self.rates[islands.pop()]
        return rates.link if len(places) == 1 else rates.network

    def _place(self, rank: int) -> tuple[int, int]:
        """The rank's island, and its machine there."""
        for number, island in enumerate(self.cluster.islands):
            if rank < island.size:
                return number, rank // island.devices
            rank -= island.size
        raise LookupError("more ranks than devices")


def seconds(work: CountedWork, rates: CardRates) -> float:
    attention = sum(flops / rates.attention_at(keys) for keys, flops in work.attention.items())
    products = work.products / rates.dense + work.experts / rates.grouped
    return products + attention + work.passes / rates.elementwise + work.update / rates.update


def show(
    wanted: Wanted, traces: Mapping[int, Trace], alike: Sequence[Sequence[int]], micro_batches: str, quiet: bool
) -> dict[str, Any]:
    """Draws it, prints the line of totals, and returns the numbers for programs. micro_batches: how many were run, in
    words."""
    cluster = placed(wanted, len(traces))
    times = timed(traces, ClusterRates(cluster))
    last = slowest(times.values())
    shown = drawn(times, alike, last)
    if isinstance(wanted.target, Path):
        write_picture(wanted.target, as_svg(shown))
    if not quiet:
        for k, line in enumerate(_lines(wanted, cluster, last, micro_batches, len(shown), len(alike))):
            emit(f"{'timeline' if k == 0 else '':<9}{line}")
        for line in as_text(shown) if wanted.target == TERMINAL else ():
            emit(f"  {line}")
    return {
        "file": None if wanted.target == TERMINAL else str(wanted.target),
        "cluster": cluster.describe(),
        "assumed": wanted.cluster is None,
        "step": micro_batches,
        "slowest": last.rank,
        **numbers(last),
        "ranks": [{"rank": one.rank, **numbers(one)} for one in shown],
    }


def numbers(one: RankTimes) -> dict[str, float]:
    return {
        "step_seconds": one.step,
        "computing_seconds": one.computed,
        "communication_seconds": one.communication,
        "hidden_seconds": one.hidden,
        "exposed_seconds": one.exposed,
        "waiting_seconds": one.waiting,
    }


def drawn(times: Mapping[int, RankTimes], alike: Sequence[Sequence[int]], last: RankTimes) -> list[RankTimes]:
    """One of each kind, the slowest for its own; of many kinds some from the first to the last."""
    ranks = sorted(last.rank if last.rank in kind else kind[0] for kind in alike)
    chosen = {ranks[k * (len(ranks) - 1) // (SHOWN - 1)] for k in range(SHOWN)} if len(ranks) > SHOWN else set(ranks)
    if last.rank not in chosen:
        chosen.remove(min(chosen, key=lambda rank: abs(rank - last.rank)))
    return [times[rank] for rank in sorted(chosen | {last.rank})]


def _lines(
    wanted: Wanted, cluster: Cluster, last: RankTimes, micro_batches: str, shown: int, kinds: int
) -> Iterator[str]:
    assumed = " (no --cluster given)" if wanted.cluster is None else ""
    parts = (last.step, last.computed, last.communication, last.hidden, last.exposed, last.waiting)
    step, computes, transfers, hidden, exposed, waits = map(time_text, parts)
    yield (
        f"{step} for a step of {micro_batches} on {cluster.describe()}{assumed}: rank {last.rank} computes {computes}, "
        f"transfers {transfers} ({hidden} hidden, {exposed} exposed), waits {waits}"
    )
    if isinstance(wanted.target, Path):
        yield f"{wanted.target}: {shown} of {kinds} kinds of ranks"


def time_text(value: float) -> str:
    if 5e-8 < value < 1e-4:
        return f"{value * 1e6:.{1 if value < 1e-6 else 0}f} µs"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
