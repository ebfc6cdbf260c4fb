"""Unlike islands: a pipeline across them, everything else inside one, more layers where devices are faster.

Called by recipes/plan_command.py. Stages have as many ranks each, so islands are cut in groups of a common size. What
parallel/islands.py refuses is not planned: sharded weights, and devices of one vendor in two
places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import gcd

from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout
from erniekit.planner import timing
from erniekit.planner.cluster import Cluster
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate, held_of, work_of, written_keys
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB, PeakBytes, layers_of, recomputing, rounded, step_bytes
from erniekit.planner.schedule import StageTimes, step_seconds
from erniekit.planner.search import Ranking, divisors

MOST_STAGES = 64


def across(job: Job, cluster: Cluster, places: Sequence[DevicePool]) -> Ranking:
    """Every stage size that all islands divide by, with tensor and data parallelism inside a stage."""
    if job.data_only:
        raise PlanError(
            "unlike islands are a pipeline, and this run takes data parallelism and sharding alone",
            where=cluster.text,
            fix="plan it on one of the islands",
        )
    vendors = [vendor for vendor, _ in groupby(island.card.vendor for island in cluster.islands)]
    if len(vendors) > len(set(vendors)):
        what = f"islands of one vendor are apart: {', '.join(vendors)}"
        raise PlanError(what, where=cluster.text, fix="list those of one vendor next to each other")
    ranked: list[Candidate] = []
    failed: dict[str, tuple[int, str]] = {}
    nearest, tried = None, 0
    experts = job.model.moe.experts if job.model.moe else 0
    for group in divisors(gcd(*(island.size for island in cluster.islands))):
        stages = [place for place, island in zip(places, cluster.islands) for _ in range(island.size // group)]
        if len(stages) > min(job.model.num_layers, MOST_STAGES):
            continue
        for layout in _inside(group, len(stages), min(i.devices for i in cluster.islands), experts):
            if not job.micro_batches(layout):
                continue
            tried += 1
            made = _evaluate(job, layout, stages, cluster.between)
            if not made.problem:
                ranked.append(replace(made, keys=made.keys | {"islands": island_values(cluster)}))
                continue
            name = f"stages of {group}"
            failed[name] = (failed.get(name, (0, ""))[0] + 1, made.problem)
            if nearest is None or made.most.total < nearest.most.total:
                nearest = made
    ranked.sort(key=lambda one: -one.tokens)
    if not tried:
        why = f"a step's packs ({job.packs}) divide over no stage of these islands"
        return Ranking([], None, {"any": (0, why)}, 0)
    return Ranking(ranked, nearest, failed, tried)


def island_values(cluster: Cluster) -> list[str]:
    """As the key `islands` names them; the cut of the layers is in pp_seg_method."""
    return [f"{island.card.vendor}:{island.size}" for island in cluster.islands]


def _inside(group: int, stages: int, devices: int, experts: int) -> Iterator[Layout]:
    for tp in (d for d in divisors(group) if d <= min(8, devices)):
        rest = group // tp
        one = Layout(pp=stages, dp=rest, tp=tp, sequence_parallel=tp > 1)
        yield one
        if experts and 1 < tp <= experts:
            yield replace(one, experts="tp")
        if experts and rest > 1 and experts % rest == 0:
            yield replace(one, experts="data")


def split(weights: Sequence[float], layers: int) -> list[int]:
    """Layers of each stage in proportion, at least one each; the largest remainders take what is left."""
    whole = sum(weights)
    shares = [max(1.0, w / whole * layers) for w in weights]
    counts = [max(1, int(w)) for w in shares]
    while sum(counts) > layers:
        counts[max(range(len(counts)), key=lambda k: counts[k] - shares[k] if counts[k] > 1 else -layers)] -= 1
    while sum(counts) < layers:
        counts[max(range(len(counts)), key=lambda k: shares[k] - counts[k])] += 1
    return counts


def _evaluate(job: Job, layout: Layout, stages: Sequence[DevicePool], between: float) -> Candidate:
    """With layers in proportion to speed; where an island has too little memory for its share, the others take more."""
    speeds = [place.rates.dense for place in stages]
    weights = list(speeds)
    made = None
    for _ in range(6):
        counts = split(weights, job.model.num_layers)
        made, over = _with(job, layout, stages, counts, between)
        if not made.problem:
            return made
        weights = [w * (0.8 if stage in over else 1.0) for stage, w in enumerate(weights)]
    assert made is not None
    return made


def _with(
    job: Job, layout: Layout, stages: Sequence[DevicePool], counts: Sequence[int], between: float
) -> tuple[Candidate, set[int]]:
    m = job.micro_batches(layout)
    bounds = [0, *accumulate(counts)]
    layout = replace(layout, stage_cuts=tuple(bounds[1:-1]))
    tokens = job.rows * job.length
    found: list[PeakBytes] = []
    over, again, forward, backward, sends, update = set(), [], [], [], [], 0.0
    for rank, place in enumerate(stages):
        numbers = list(range(bounds[rank], bounds[rank + 1]))
        held, share = held_of(job, layout, numbers, rank == 0, rank == len(stages) - 1, m)
        work = work_of(job, layout, numbers, rank, m, tokens, place.card.triton)
        every = job.recompute not in ("", "auto")
        taken = rounded(step_bytes(job.model, held, recomputing(work, len(numbers) if every else 0)))
        if not every and taken.total > place.room:
            every, taken = True, rounded(step_bytes(job.model, held, recomputing(work, len(numbers))))
        again += numbers if every else []
        found.append(taken)
        if taken.total > place.room:
            over.add(rank)
        links = timing.LinkRates(place.rates, place.devices)
        kinds = {s: timing.layer_time(job, s, layout, tokens, place.rates, links) for s in set(work.layers)}
        f = sum(kinds[s].forward for s in layers_of(job.model, numbers))
        b = sum(kinds[s].backward for s in layers_of(job.model, numbers)) + (f if every else 0.0)
        f *= 1 + job.forwards
        if rank == len(stages) - 1:
            f += timing.head_time(job, layout, tokens, place.rates)[0] * (1 + job.forwards / 3)
        forward.append(f)
        backward.append(b)
        same = rank + 1 < len(stages) and stages[rank + 1] is place
        hidden = tokens * job.model.hidden_size * job.compute
        sends.append(hidden / (place.rates.network if same else between) + place.rates.latency)
        _overlapped, after = timing.sharing_time(job, layout, share, m, links)
        update = max(update, after + timing.update_time(share, job, place.rates))
    made = Candidate(layout, m, stages=tuple(found), again=tuple(again), worst=max(b.total for b in found))
    keys = written_keys(job, made)
    keys["pp_seg_method"] = [0, *(b + 1 for b in bounds[1:-1]), job.model.num_layers + 3]
    made = replace(made, keys=keys)
    if over:
        rank = min(over)
        what = f"stage {rank}: {found[rank].total / GIB:.0f} GiB of {stages[rank].room / GIB:.0f} ({layout.describe()})"
        return replace(made, problem=what, family="memory"), over
    times = StageTimes(tuple(forward), tuple(backward), tuple(sends))
    seconds = step_seconds(job.schedule, layout.pp, 1, m, times)
    ideal = max(m * (f + b) for f, b in zip(forward, backward))
    total = seconds + update
    return replace(
        made,
        seconds=total,
        tokens=job.packs * job.length / total,
        bubble=1 - ideal / seconds,
        exact=True,
        times=times,
    ), over
