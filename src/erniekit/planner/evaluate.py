"""One layout on one kind of device: bytes of each stage, seconds of a step, or why it cannot be. For search.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any

from erniekit.parallel.mesh import Layout
from erniekit.parallel.pipeline_actions import most_in_flight
from erniekit.parallel.plan import share as even_share
from erniekit.planner import timing
from erniekit.planner.activations import Cuts, Kernels
from erniekit.planner.cards import Card, CardRates
from erniekit.planner.job import Job, keys_of
from erniekit.planner.memory import (
    FLAT,
    GIB,
    ROUNDING,
    USABLE,
    Bytes,
    Counted,
    Held,
    Work,
    bytes_of,
    counted,
    peak,
    peak_of,
    recomputing,
    rounded,
)
from erniekit.planner.schedule import StageTimes, step_seconds
from erniekit.planner.static_bytes import Share


@dataclass(frozen=True)
class Site:
    """The like devices that a layout is spread over."""

    card: Card
    rates: CardRates
    devices: int  # of a machine
    limit: float = 0.0  # bytes a rank may take; 0: what is usable of the card

    @property
    def room(self) -> float:
        return self.limit or USABLE * self.card.memory


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    micro_batches: int
    problem: str = ""  # why it cannot be; empty: it fits
    family: str = ""  # what kind of problem, for the summary
    stages: tuple[Bytes, ...] = ()  # of the fullest rank of each pipeline rank, routing balanced
    worst: float = 0.0  # bytes of the fullest rank where every token of a step's ranks goes to its experts
    again: tuple[int, ...] = ()  # layers computed again, by number
    seconds: float = 0.0
    tokens: float = 0.0  # a second
    bubble: float = 0.0  # share of the step that the pipeline waits
    waits: float = 0.0  # share that collectives take
    exact: bool = False  # the pipeline was replayed, not estimated
    away: float = 0.0  # bytes a rank has in host memory
    keys: dict[str, Any] = field(default_factory=dict)
    times: StageTimes | None = None  # of its pipeline

    @property
    def most(self) -> Bytes:
        return max(self.stages, key=lambda stage: stage.total)


def stages_of(count: int, layout: Layout) -> list[range]:
    number = layout.pp * layout.virtual_stages
    bounds = [0, *layout.stage_cuts, count] if layout.stage_cuts else None
    bounds = bounds or [even_share(count, number, s)[0] for s in range(number)] + [count]
    return [range(a, b) for a, b in pairwise(bounds)]


def evaluate(job: Job, layout: Layout, place: Site, exact: bool = False) -> Candidate:
    """exact: of every pipeline rank, its pipeline replayed, with the keys and the worst routing that a person reads.
    Otherwise what a search compares: of the ranks that may be the fullest, its pipeline estimated."""
    micro_batches = job.micro_batches(layout)
    if not micro_batches:
        what = f"{job.packs} packs a step do not divide over {layout.data_ranks} data ranks of {job.rows}"
        return Candidate(layout, 0, what, "batch")
    if layout.virtual_stages > 1 and micro_batches % layout.pp:
        what = f"{micro_batches} micro-batches do not divide over {layout.pp} pipeline ranks"
        return Candidate(layout, micro_batches, what, "batch")
    if job.length % layout.length_multiple:
        what = f"rows of {job.length} tokens do not divide by {layout.length_multiple}"
        return Candidate(layout, micro_batches, what, "length")
    if job.schedule == "zero_bubble" and layout.pp > 1 and layout.fsdp > 1:
        return Candidate(layout, micro_batches, "pp_schedule: zero_bubble and sharded weights", "schedule")
    stages = _stages(job, layout)
    tokens = job.rows * job.length // layout.cp
    per_rank, again, worst, away = [], [], 0.0, 0.0
    looked = range(layout.pp) if exact else sorted({0, 1, layout.pp - 1} & set(range(layout.pp)))
    for rank in looked:  # the first holds most micro-batches, the last the head
        numbers = [n for s in range(rank, len(stages), layout.pp) for n in stages[s]]
        held = _held(job, layout, numbers, rank, micro_batches)
        works = _works(job, layout, numbers, rank, micro_batches, tokens, place.card.triton)
        count = _recomputed(job, held, works, place.room)
        work = works(count, "full" if job.recompute in ("", "auto", "full") else job.recompute)
        per_rank.append(rounded(bytes_of(job.model, held, work)))
        again += numbers[:count]
        if exact:
            skewed = replace(work.work, cuts=replace(work.work.cuts, rows=_worst_rows(job, layout)))
            worst = max(worst, ROUNDING * peak(job.model, held, skewed))
        away = max(away, held.away)
    made = Candidate(layout, micro_batches, stages=tuple(per_rank), worst=worst, again=tuple(again), away=away)
    if exact:
        made = replace(made, keys=written_keys(job, made))
    if (most := made.most.total) > place.room:
        what = f"{most / GIB:.0f} GiB a rank of {place.room / GIB:.0f}: {largest(made.most)}"
        return replace(made, problem=what, family="memory")
    return timed(job, made, place, stages, exact)


def largest(found: Bytes) -> str:
    """What takes the most, as text."""
    named = sorted(((v, k) for k, v in found.shown().items() if k != "total"), reverse=True)[:2]
    return ", ".join(f"{name} {gib:.0f}" for gib, name in named)


def written_keys(job: Job, made: Candidate) -> dict[str, Any]:
    keys = keys_of(made.layout, made.micro_batches)
    if job.blocks.storing.shards_away and "sharding" in keys:
        keys["sharding"] += " offload"
    if made.again:
        kept = [n for n in range(job.model.num_layers) if n not in set(made.again)]
        keys |= {"recompute": True, "recompute_granularity": "full", "no_recompute_layers": kept}
        if job.recompute not in ("", "auto", "full"):
            keys["recompute_granularity"] = job.recompute
    else:
        keys["recompute"] = False
    return keys


def _stages(job: Job, layout: Layout) -> list[range]:
    key = ("stages", layout.pp, layout.virtual_stages, layout.stage_cuts)
    if key not in job.known:
        job.known[key] = stages_of(job.model.num_layers, layout)
    found: list[range] = job.known[key]
    return found


def _held(job: Job, layout: Layout, numbers: list[int], rank: int, micro_batches: int) -> Held:
    """Computed once for all layouts that cut tensors alike and have as many layers of each kind here."""
    sparse = sum(job.blocks.sparse[n] for n in numbers)
    key = (
        "held", *job.blocks.cut(layout, micro_batches), layout.sharding_stage, layout.pp > 1, rank == 0,
        rank == layout.pp - 1, len(numbers), sparse,
    )  # fmt: skip
    if key not in job.known:
        job.known[key] = held_of(job, layout, numbers, rank == 0, rank == layout.pp - 1, micro_batches)[0]
    found: Held = job.known[key]
    return found


def _works(
    job: Job, layout: Layout, numbers: list[int], rank: int, micro_batches: int, tokens: int, fused: bool
) -> Callable[[int, str], Counted]:
    """(layers computed again, how) -> what a rank computes: once for all layouts that cut layers alike."""
    like = ("work", *_cut_layers(layout), rank, micro_batches if layout.pp > 1 else 1, fused)

    def works(count: int, how: str) -> Counted:
        key = (*like, count, how)
        if key not in job.known:
            work = work_of(job, layout, numbers, rank, micro_batches, tokens, fused)
            job.known[key] = counted(job.model, recomputing(work, count, how))
        found: Counted = job.known[key]
        return found

    return works


def _cut_layers(layout: Layout) -> tuple[object, ...]:
    """Equal for layouts whose ranks compute alike in a micro-batch."""
    return (
        layout.pp, layout.virtual_stages, layout.stage_cuts, layout.tp, layout.cp, layout.sequence_parallel,
        layout.experts_over,
    )  # fmt: skip


def _recomputed(job: Job, held: Held, works: Callable[[int, str], Counted], room: float) -> int:
    """Layers of a rank that are computed again: as the recipe sets, or as few as fit."""
    count = len(works(0, "full").work.layers)
    if job.recomputed is not None:
        return min(count, job.recomputed)
    if job.recompute not in ("", "auto"):
        return count

    def fits(number: int) -> bool:
        return peak_of(job.model, held, works(number, "full")) * ROUNDING <= room

    if fits(0) or not count:
        return 0
    low, high = 1, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def held_of(
    job: Job, layout: Layout, numbers: list[int], first: bool, last: bool, micro_batches: int
) -> tuple[Held, Share]:
    blocks, storing = job.blocks, job.blocks.storing
    share = blocks.stage(layout, numbers, first, last, micro_batches)
    layer = blocks.largest_layer(layout, numbers, micro_batches)
    states = share.master + share.moments
    away = (states if storing.optimiser_away else 0.0) + (share.weights + states if storing.shards_away else 0.0)
    buffers = FLAT if layout.size > 1 and layout.fsdp == 1 and share.trained else 0.0
    gathered, formed = 0.0, layer.formed
    if layout.fsdp > 1:
        around = blocks.stage(layout, [], first, last, micro_batches).gathered
        # Stage 3 has the layer at work and the one after it; what arrives is copied out of one buffer.
        gathered = share.gathered + layer.gathered if layout.sharding_stage < 3 else around + 3 * layer.gathered
        formed = layer.formed + 4 * layer.reduced  # as formed, and in fp32 while it is shared out
        if layout.sharding_stage == 1 and micro_batches > 1:
            formed += 4 * share.reduced  # summed whole until the last micro-batch
    head = 0.0
    if last:
        each = blocks.shares(layout, micro_batches)
        trained = each["embed"].reduced if blocks.sharding.embeds_last else each["last"].reduced
        head = 4.0 * trained
    gradients = layer.gradients if storing.in_backward else share.gradients
    return Held(
        weights=(0.0 if storing.shards_away else share.weights) + teacher_bytes(job),
        optimiser=0.0 if away else states,
        gradients=gradients,
        layer_gradients=formed,
        gathered=gathered,
        head_gradient=head,
        from_start=micro_batches > 1 or (layout.fsdp > 1 and layout.pp > 1),
        unpacked=share.largest,
        buffers=buffers,
        away=away,
        staged=blocks.staged(layout, numbers, first, last, micro_batches) if storing.optimiser_away else 0.0,
    ), share


def work_of(
    job: Job, layout: Layout, numbers: list[int], rank: int, micro_batches: int, tokens: int, fused: bool
) -> Work:
    last = rank == layout.pp - 1
    in_flight = 1.0
    if layout.pp > 1:
        in_flight = most_in_flight(layout.pp, layout.virtual_stages, micro_batches, rank)
    return Work(
        layers=tuple(job.blocks.sparse[n] for n in numbers),
        tokens=tokens,
        in_flight=in_flight,
        head_rows=job.head_rows if last else 0,
        head_tokens=ceil(tokens * job.trained) if last else 0,
        vocabulary=ceil(job.model.outputs / layout.tp),
        cuts=cuts_of(layout),
        kernels=Kernels(fused and job.compute == 2, job.rank, job.compute, job.in_fp8("experts")),
        seeing=job.seeing / (layout.tp * layout.cp) if rank == 0 else 0.0,  # pictures are dealt out among those ranks
        compared=_compared(job, tokens) if last else 0.0,
    )


def teacher_bytes(job: Job) -> float:
    return float(job.teacher.parameters() * job.compute) if job.teacher is not None else 0.0


def _compared(job: Job, tokens: int) -> float:
    """Of a teacher: its last states of all tokens; and of a chunk of them seven tensors of logits in fp32, of both
    models, their logarithms, probabilities and differences."""
    if job.teacher is None:
        return 0.0
    rows = min(job.head_rows, ceil(tokens * job.trained))
    return tokens * job.teacher.hidden_size * job.compute + 7.0 * 4 * rows * job.teacher.vocab_size


def cuts_of(layout: Layout) -> Cuts:
    rows = 1.0 / layout.tp if layout.experts_over in ("tp", "world") else 1.0
    inside = layout.tp if layout.experts_over in ("none", "data") else 1
    return Cuts(layout.tp, layout.sequence_parallel, inside, rows)


def _worst_rows(job: Job, layout: Layout) -> float:
    """Of a choice's rows, where all tokens choose experts of one rank: it has few of them, and a token takes each
    once."""
    balanced = cuts_of(layout).rows
    if job.model.moe is None or layout.experts_over == "none":
        return balanced
    here = ceil(job.model.moe.experts / layout.expert_ranks)
    senders = layout.expert_ranks if layout.experts_over_data else layout.tp
    return balanced * senders * min(1.0, here / job.model.moe.choices)


@dataclass(frozen=True)
class Computed:
    """Seconds of one micro-batch."""

    forward: tuple[float, ...]  # of each stage
    backward: tuple[float, ...]
    waiting: float  # the most that a layer's collectives take
    slowest: float  # of all stages of a rank together, the most
    longest: float  # of a stage, the most


def computed(job: Job, layout: Layout, place: Site, stages: list[range], again: tuple[int, ...]) -> Computed:
    """Once for all layouts that cut layers alike. The place is kept with what was computed of it, so that no other
    place gets its id."""
    _, known = job.known.setdefault(id(place), (place, {}))
    key = (*_cut_layers(layout), layout.expert_ranks, again)
    if key not in known:
        known[key] = _computed(job, layout, place, stages, again)
    found: Computed = known[key]
    return found


def _computed(job: Job, layout: Layout, place: Site, stages: list[range], numbers: tuple[int, ...]) -> Computed:
    rates, links = place.rates, timing.Links(place.rates, place.devices)
    tokens = job.rows * job.length // layout.cp
    sparse = job.blocks.sparse
    kinds = {s: timing.layer_time(job, s, layout, tokens, rates, links) for s in set(sparse)}
    waits = {s: timing.exchanges(job, s, layout, tokens, links) for s in kinds}
    again = set(numbers)
    forward, backward, waiting = [], [], 0.0
    for number, held in enumerate(stages):
        f = b = host = 0.0
        for n in held:
            layer = kinds[sparse[n]]
            f, b, host = f + layer.forward, b + layer.backward, host + layer.host
            times = 2
            if n in again:
                b, host, times = b + layer.forward, host + layer.host / 3, 3
            waiting = max(waiting, times * waits[sparse[n]])
        f += job.forwards * sum(kinds[sparse[n]].forward for n in held)
        host += job.forwards * sum(kinds[sparse[n]].host for n in held) / 3
        if number == len(stages) - 1:
            f += timing.head_time(job, layout, tokens, rates)[0] * (1 + job.forwards / 3)
            teacher, launches = timing.teacher_time(job, layout, tokens, rates, links)
            f, host = f + teacher, host + launches
        slow = max(1.0, host / (f + b)) if f + b else 1.0  # the host launches slower than the device computes
        forward.append(f * slow)
        backward.append(b * slow)
    each = [f + b for f, b in zip(forward, backward)]
    slowest = max(sum(each[rank :: layout.pp]) for rank in range(layout.pp))
    return Computed(tuple(forward), tuple(backward), waiting, slowest, max(each))


def timed(job: Job, made: Candidate, place: Site, stages: list[range], exact: bool) -> Candidate:
    layout, rates, m = made.layout, place.rates, made.micro_batches
    links = timing.Links(rates, place.devices)
    tokens = job.rows * job.length // layout.cp
    found = computed(job, layout, place, stages, made.again)
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
    share = job.blocks.stage(layout, stages[0], True, layout.pp == 1, m)
    overlapped, after = timing.sharing_time(job, layout, share, m, links)
    hidden_by = seconds if place.card.overlaps else 0.0
    after += max(0.0, overlapped - hidden_by)
    total = seconds + after + timing.update_time(share, job, rates)
    layers = sum(len(stages[s]) for s in range(0, len(stages), layout.pp))
    return replace(
        made,
        seconds=total,
        tokens=job.packs * job.length / total,
        bubble=max(0.0, 1 - ideal / seconds) if seconds else 0.0,
        waits=min(1.0, (m * layers * found.waiting + after) / total),
        exact=exact or layout.pp == 1,
        times=piped,
    )
