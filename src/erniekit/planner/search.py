"""Which layouts of a cluster fit and which is fastest: products of degrees, pruned before they are counted.

Layouts are first timed with an estimate of the pipeline's wait; the best are then replayed. For plan_command.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout, fit
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate, evaluate
from erniekit.planner.job import Job

REPLAYED = 24  # of the fastest by estimate, at least
LONG = 16384  # tokens of a row below which context parallelism is not tried
MOST_TENSOR = 8
SPREAD = 150  # layouts tried for the smallest cluster
DIVISIBLE = 2**10 * 3**2 * 5 * 7 * 11 * 13  # packs that divide over the data ranks of usual clusters


@dataclass(frozen=True)
class Ranking:
    ranked: list[Candidate]  # that fit, the fastest first
    nearest: Candidate | None  # of those that do not fit, the one with the least bytes
    failed: dict[str, tuple[int, str]] = field(
        default_factory=dict
    )  # family of layouts -> how many, why the best of it
    tried: int = 0


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def layouts(job: Job, ranks: int, devices: int) -> Iterator[Layout]:
    """devices: of a machine; tensor parallelism stays inside one."""
    c = job.model
    if job.data_only:
        if job.packs % (job.rows * ranks) == 0:
            yield from _spread(job, Layout(), ranks, devices)
        return
    most_tp = min(MOST_TENSOR, devices, max(c.num_heads, 1))
    for tp in (d for d in divisors(ranks) if d <= most_tp and devices % d == 0):
        for pp in (d for d in divisors(ranks // tp) if d <= c.num_layers):
            for cp in _contexts(job, ranks // (tp * pp)):
                rest = ranks // (tp * pp * cp)
                if job.packs % (job.rows * rest):
                    continue  # no layout of these degrees has the step's packs
                yield from _spread(job, Layout(pp=pp, cp=cp, tp=tp, sequence_parallel=tp > 1), rest, devices)


def _contexts(job: Job, remaining: int) -> list[int]:
    return [d for d in divisors(remaining) if d == 1 or (job.length >= LONG and d <= 16 and job.length // d >= 2048)]


def _spread(job: Job, base: Layout, rest: int, devices: int) -> Iterator[Layout]:
    inside = max(1, devices // (base.tp * base.cp))
    shards = sorted({d for d in (1, rest, min(rest, inside)) if rest % d == 0})
    micro_batches = job.packs // (job.rows * rest)
    virtual = [1]
    if base.pp > 1 and micro_batches % base.pp == 0:
        virtual += [v for v in (2, 4) if base.pp * v <= job.model.num_layers]
    for fsdp in shards:
        for stage in (1, 2, 3) if fsdp > 1 else (1,):
            if stage == 2 and micro_batches == 1:
                continue  # the same as stage 1
            for v in virtual:
                # Written out here and below: `replace` takes several times as long.
                one = Layout(base.pp, rest // fsdp, fsdp, base.cp, base.tp, base.sequence_parallel, stage, v)
                yield one
                yield from _experts(job, one)


def _experts(job: Job, one: Layout) -> Iterator[Layout]:
    moe = job.model.moe
    if moe is None:
        return
    cut = (one.pp, one.dp, one.fsdp, one.cp, one.tp, one.sequence_parallel)
    sharing = (one.sharding_stage, one.virtual_stages, one.stage_cuts)
    if 1 < one.tp <= moe.experts:
        yield Layout(*cut, *sharing, "tp")
    # Of one tensor-parallel rank both are the same; of several, whole experts are the faster.
    kind = "data" if one.tp == 1 else "world"
    pool = Layout(*cut, experts=kind).expert_pool
    for degree in (d for d in divisors(pool) if 1 < d <= min(moe.experts, 128) and moe.experts % d == 0):
        yield Layout(*cut, *sharing, kind, 0 if degree == pool else degree)


def search(job: Job, pool: DevicePool, ranks: int, shown: int = 0) -> Ranking:
    """shown: how many of the fastest a person will read, or take."""
    fits: list[Candidate] = []
    failed: dict[str, list[Candidate]] = {}
    tried, nearest = 0, None
    for layout in layouts(job, ranks, pool.devices):
        try:
            layout = fit(ranks, layout)
        except PlanError:
            continue
        tried += 1
        made = evaluate(job, layout, pool)
        if not made.problem:
            fits.append(made)
            continue
        failed.setdefault(family(layout), []).append(made)
        if made.stages and (nearest is None or made.most.total < nearest.most.total):
            nearest = made
    if not tried:
        return Ranking([], None, {"any": (0, batch_problem(job, ranks))}, 0)
    fits.sort(key=lambda one: -one.tokens)
    count = max(REPLAYED, shown)
    best = sorted((evaluate(job, one.layout, pool, exact=True) for one in fits[:count]), key=lambda one: -one.tokens)
    return Ranking(best + fits[count:], nearest, _rejected(failed, {family(one.layout) for one in fits}), tried)


def batch_problem(job: Job, ranks: int) -> str:
    return f"a step's packs ({job.packs}, {job.rows} in a micro-batch) divide over no number of data ranks of {ranks}"


def family(layout: Layout) -> str:
    """The axes of a layout without their degrees."""
    axes = [axis for axis in ("tp", "pp", "cp", "dp") if getattr(layout, axis) > 1]
    axes += [f"stage{layout.sharding_stage}"] if layout.fsdp > 1 else []
    axes += ["ep"] if layout.experts_over_data else []
    return " x ".join(axes) or "one device"


def _rejected(failed: dict[str, list[Candidate]], fitting: set[str]) -> dict[str, tuple[int, str]]:
    """Of each family of which nothing fits: how many layouts, and why the nearest does not."""
    out = {}
    for name, members in failed.items():
        if name in fitting:
            continue
        near = min(members, key=lambda one: one.most.total if one.stages else float("inf"))
        problem = near.problem
        if near.family != "memory":
            problem = Counter(one.problem for one in members).most_common(1)[0][0]
        out[name] = (len(members), f"{problem} ({near.layout.describe()})")
    return dict(sorted(out.items(), key=lambda item: -item[1][0]))


def smallest(job: Job, pool: DevicePool, most: int) -> int | None:
    """The fewest like devices on which some layout fits: powers of two, then by whole machines between the last that
    did not fit and the first that does. None: not even twice `most`. Of a batch that divides over any number of ranks:
    the number of devices matters, not whether packs come out even."""
    job = replace(job, packs=job.rows * DIVISIBLE)
    counts, n = [n for n in (1, 2, 4, 8) if n < pool.devices], pool.devices
    while n <= 2 * most:
        counts.append(n)
        n *= 2
    least = least_bytes(job) / pool.room

    def fits(count: int) -> bool:
        return least <= count and _any_fits(job, pool, count)

    found = next((count for count in counts if fits(count)), None)
    if found is None or found <= pool.devices:
        return found
    step = max(pool.devices, found // 16)
    return next(count for count in range(found // 2 + step, found + 1, step) if count == found or fits(count))


def least_bytes(job: Job) -> float:
    """What all ranks together hold at the least, however a model is spread: every weight and its moments once. Masters
    are left out, as sharded weights are their own."""
    storing = job.blocks.storing
    share = job.blocks.stage(Layout(), range(job.model.num_layers), True, True, 1)
    return (0.0 if storing.shards_away else share.weights) + (
        0.0 if storing.optimiser_away or storing.shards_away else share.moments
    )


def _any_fits(job: Job, pool: DevicePool, ranks: int) -> bool:
    """Of the layouts that spread most: weights and states, or what is kept of a row."""
    every = list(layouts(job, ranks, min(pool.devices, ranks)))
    tried = [one for order in (_states_spread, _rows_spread) for one in sorted(every, key=order)[: SPREAD // 2]]
    return any(not evaluate(job, layout, pool).problem for layout in dict.fromkeys(tried))


def _states_spread(layout: Layout) -> tuple[int, ...]:
    return (-layout.sharding_stage * (layout.fsdp > 1), -layout.fsdp * layout.pp * layout.tp, -layout.expert_ranks)


def _rows_spread(layout: Layout) -> tuple[int, ...]:
    return (-layout.tp * layout.cp, -layout.expert_ranks, *_states_spread(layout))
