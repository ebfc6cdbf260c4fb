"""Seconds of a step of one layout on one kind of device, and the layers of its pipeline's ranks. For evaluate.py;
`alone` for recipes/plan_check.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from erniekit.parallel.layout import Layout
from erniekit.parallel.plan import share as even_share
from erniekit.planner import timing
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.job import Job
from erniekit.planner.schedule import StageTimes, step_seconds
from erniekit.planner.static_bytes import TensorBytes


def stages_of(count: int, layout: Layout) -> list[range]:
    number = layout.pp * layout.virtual_stages
    bounds = [0, *layout.stage_cuts, count] if layout.stage_cuts else None
    bounds = bounds or [even_share(count, number, s)[0] for s in range(number)] + [count]
    return [range(a, b) for a, b in pairwise(bounds)]


class PipelineStages(NamedTuple):
    """The layers of a pipeline."""

    layers: list[range]  # of each stage
    numbers: list[list[int]]  # of each rank
    sparse: list[int]  # how many of a rank's have experts
    fullest: list[int]  # ranks that may be: the first holds most micro-batches, the last the head, the second experts


def pipeline_stages(job: Job, layout: Layout) -> PipelineStages:
    key = ("stages", layout.pp, layout.virtual_stages, layout.stage_cuts)
    if key not in job.known:
        layers, pp = stages_of(job.model.num_layers, layout), layout.pp
        numbers = [[n for held in layers[rank::pp] for n in held] for rank in range(pp)]
        sparse = [sum(job.blocks.sparse[n] for n in held) for held in numbers]
        job.known[key] = PipelineStages(layers, numbers, sparse, sorted({0, 1, pp - 1} & set(range(pp))))
    found: PipelineStages = job.known[key]
    return found


def layers_cut(layout: Layout) -> tuple[object, ...]:
    """Equal for layouts whose ranks compute alike in a micro-batch."""
    return (
        layout.pp, layout.virtual_stages, layout.stage_cuts, layout.tp, layout.cp, layout.sequence_parallel,
        layout.experts_over,
    )  # fmt: skip


class MicroBatchTimes(NamedTuple):
    """Seconds of one micro-batch."""

    forward: tuple[float, ...]  # of each stage
    backward: tuple[float, ...]
    waiting: float  # the most that a layer's collectives take
    slowest: float  # of all stages of a rank together, the most
    longest: float  # of a stage, the most


def computed(
    job: Job, layout: Layout, pool: DevicePool, stages: list[range], again: tuple[int, ...]
) -> MicroBatchTimes:
    """Once for all layouts that cut layers alike. The pool is kept with what was computed of it, so that no other
    pool gets its id."""
    _, known = job.known.setdefault(id(pool), (pool, {}))
    key = (*layers_cut(layout), layout.expert_ranks, again)
    if key not in known:
        like = ("layers", layout.tp, layout.cp, layout.sequence_parallel, layout.experts_over, layout.expert_ranks)
        if like not in known:
            tokens = job.rows * job.length // layout.cp
            args = (layout, tokens, pool.rates, timing.LinkRates(pool.rates, pool.devices))
            known[like] = {sparse: timing.layer_time(job, sparse, *args) for sparse in set(job.blocks.sparse)}
        known[key] = _computed(job, layout, pool, stages, again, known[like])
    found: MicroBatchTimes = known[key]
    return found


def _computed(
    job: Job,
    layout: Layout,
    pool: DevicePool,
    stages: list[range],
    numbers: tuple[int, ...],
    kinds: dict[bool, timing.LayerTime],
) -> MicroBatchTimes:
    rates, links = pool.rates, timing.LinkRates(pool.rates, pool.devices)
    tokens = job.rows * job.length // layout.cp
    sparse, again = job.blocks.sparse, set(numbers)
    forward, backward, waiting = [], [], 0.0
    for number, held in enumerate(stages):
        f = b = host = 0.0
        for n in held:
            layer = kinds[sparse[n]]
            f, b, host = f + layer.forward, b + layer.backward, host + layer.host
            times = 2
            if n in again:
                b, host, times = b + layer.forward, host + layer.host / 3, 3
            waiting = max(waiting, times * layer.waiting)
        if job.forwards:
            f += job.forwards * sum(kinds[sparse[n]].forward for n in held)
            host += job.forwards * sum(kinds[sparse[n]].reference for n in held)
        if number == len(stages) - 1:
            f += timing.head_time(job, layout, tokens, rates)[0] * (1 + job.forwards / 3)
            teacher, launches = timing.teacher_time(job, layout, tokens, rates, links)
            f, host = f + teacher, host + launches
        slow = max(1.0, host / (f + b)) if f + b else 1.0  # the host launches slower than the device computes
        forward.append(f * slow)
        backward.append(b * slow)
    each = [f + b for f, b in zip(forward, backward)]
    slowest = max(sum(each[rank :: layout.pp]) for rank in range(layout.pp))
    return MicroBatchTimes(tuple(forward), tuple(backward), waiting, slowest, max(each))


class StepTimes(NamedTuple):
    """As `Candidate` has them."""

    seconds: float
    tokens: float
    bubble: float
    waits: float
    exact: bool
    piped: StageTimes | None


NOT_TIMED = StepTimes(0.0, 0.0, 0.0, 0.0, False, None)


def timed(job: Job, layout: Layout, m: int, again: tuple[int, ...], pool: DevicePool, exact: bool) -> StepTimes:
    """m: micro-batches."""
    rates, stages = pool.rates, pipeline_stages(job, layout).layers
    links = timing.LinkRates(rates, pool.devices)
    tokens = job.rows * job.length // layout.cp
    found = computed(job, layout, pool, stages, again)
    hidden = tokens * job.model.hidden_size * job.compute / (layout.tp if layout.sequence_parallel else 1)
    reach = layout.size // layout.pp + 1
    send = hidden / links.over(reach) + rates.latency if layout.pp > 1 else 0.0
    ideal = m * found.slowest
    piped = StageTimes(found.forward, found.backward, send) if layout.pp > 1 else None
    if piped is None:
        seconds = ideal
    elif exact:
        seconds = step_seconds(job.schedule, layout.pp, layout.virtual_stages, m, piped)
    else:
        seconds = ideal + (layout.pp - 1) * (found.longest + 2 * send)
    after, update = _after(job, layout, m, pool, seconds, sum(found.backward))
    total = seconds + after + update
    layers = sum(len(stages[s]) for s in range(0, len(stages), layout.pp))
    return StepTimes(
        seconds=total,
        tokens=job.packs * job.length / total,
        bubble=max(0.0, 1 - ideal / seconds) if seconds else 0.0,
        waits=min(1.0, (m * layers * found.waiting + after) / total),
        exact=exact or layout.pp == 1,
        piped=piped,
    )


def _after(job: Job, layout: Layout, m: int, pool: DevicePool, seconds: float, backward: float) -> tuple[float, float]:
    """What follows the pipeline: (collectives of weights and gradients that do not end beside it, the update). Of the
    rank that takes longest, as all begin their updates together, when the norm of all gradients is known, and
    the next step needs every one. The first rank of a model with experts may have only dense layers, and few states.
    backward: of one micro-batch."""
    stages, links = pipeline_stages(job, layout), timing.LinkRates(pool.rates, pool.devices)
    hidden_by = seconds if pool.card.overlaps else 0.0
    found = []
    for rank in stages.fullest:
        share = _share(job, layout, rank, m)
        overlapped, after = timing.sharing_time(job, layout, share, m, links)
        if pool.card.overlaps:
            after -= min(backward, after * timing.early_share(job, layout, share))
        found.append((after + max(0.0, overlapped - hidden_by), timing.update_time(share, job, pool.rates)))
    return max(found, key=sum)


def _share(job: Job, layout: Layout, rank: int, m: int) -> TensorBytes:
    numbers = pipeline_stages(job, layout).numbers[rank]
    return job.blocks.stage(layout, numbers, rank == 0, rank == layout.pp - 1, m)


def alone(job: Job, layout: Layout, rank: int, m: int, again: tuple[int, ...], pool: DevicePool) -> float:
    """Seconds of a step of one pipeline rank without communication and without pipeline bubbles: its own stages for
    each of m micro-batches, and its own update once."""
    stages = pipeline_stages(job, layout)
    silent = replace(pool, rates=replace(pool.rates, link=inf, network=inf, latency=0.0))
    found = computed(job, layout, silent, stages.layers, again)
    each = sum(found.forward[rank :: layout.pp]) + sum(found.backward[rank :: layout.pp])
    return m * each + timing.update_time(_share(job, layout, rank, m), job, pool.rates)
