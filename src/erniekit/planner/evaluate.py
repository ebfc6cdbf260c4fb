"""One layout on one kind of device: bytes of each stage, seconds of a step, or why it cannot be. For search.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from erniekit.models import costs
from erniekit.parallel.layout import Layout
from erniekit.parallel.pipeline_actions import most_in_flight
from erniekit.planner.activations import ActivationCuts, LayerKernels
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.job import Job, keys_of
from erniekit.planner.memory import (
    FLAT,
    GIB,
    ROUNDING,
    HeldBytes,
    PeakBytes,
    RankWork,
    WeighedWork,
    bytes_of,
    counted,
    peak,
    peak_of,
    recomputing,
    rounded,
)
from erniekit.planner.schedule import StageTimes
from erniekit.planner.static_bytes import TensorBytes
from erniekit.planner.step_time import NOT_TIMED, layers_cut, pipeline_stages, timed


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    micro_batches: int
    problem: str = ""  # why it cannot be; empty: it fits
    family: str = ""  # what kind of problem, for the summary
    stages: tuple[PeakBytes, ...] = ()  # of the fullest rank of each pipeline rank, routing balanced
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

    @cached_property  # a search reads it several times of every layout
    def most(self) -> PeakBytes:
        return max(self.stages, key=lambda stage: stage.total)


def evaluate(job: Job, layout: Layout, pool: DevicePool, exact: bool = False) -> Candidate:
    """exact: of every pipeline rank, its pipeline replayed, with the keys and the worst routing that a person reads.
    Otherwise what a search compares: of the ranks that may be the fullest, its pipeline estimated."""
    micro_batches = job.micro_batches(layout)
    if not micro_batches:
        what = f"a step's packs ({job.packs}) do not divide over data ranks ({layout.data_ranks} of {job.rows})"
        return Candidate(layout, 0, what, "batch")
    if layout.virtual_stages > 1 and micro_batches % layout.pp:
        what = f"a step's micro-batches ({micro_batches}) do not divide over {layout.pp} pipeline ranks"
        return Candidate(layout, micro_batches, what, "batch")
    if job.length % layout.length_multiple:
        what = f"rows of {job.length} tokens do not divide by {layout.length_multiple}"
        return Candidate(layout, micro_batches, what, "length")
    if job.schedule == "zero_bubble" and layout.pp > 1 and layout.fsdp > 1:
        return Candidate(layout, micro_batches, "pp_schedule: zero_bubble and sharded weights", "schedule")
    per_rank, again, worst, away = [], [], 0.0, 0.0
    ranks = range(layout.pp) if exact else pipeline_stages(job, layout).fullest
    for held, work, recomputed in _of_ranks(job, layout, ranks, pool.room, pool.card.triton):
        per_rank.append(rounded(bytes_of(job.model, held, work)))
        again += recomputed
        if exact:
            skewed = replace(work.work, cuts=replace(work.work.cuts, rows=_worst_rows(job, layout)))
            worst = max(worst, ROUNDING * peak(job.model, held, skewed))
        away = max(away, held.away)
    most, times, problem = max(per_rank, key=lambda one: one.total), NOT_TIMED, ""
    if most.total > pool.room:
        problem = f"{most.total / GIB:.0f} GiB a rank of {pool.room / GIB:.0f}: {largest(most)}"
    else:
        times = timed(job, layout, micro_batches, tuple(again), pool, exact)
    made = Candidate(
        layout, micro_batches, problem, "memory" if problem else "", tuple(per_rank), worst, tuple(again), *times[:4],
        exact=times.exact, away=away, times=times.piped,
    )  # fmt: skip
    return replace(made, keys=written_keys(job, made)) if exact else made


def computed_again(job: Job, layout: Layout, room: float, fused: bool) -> tuple[tuple[int, ...], PeakBytes]:
    """The layers that must be, by number, so that every rank's bytes fit `room`, and the bytes of the fullest."""
    each = list(_of_ranks(job, layout, range(layout.pp), room, fused))
    most = max((rounded(bytes_of(job.model, held, work)) for held, work, _ in each), key=lambda one: one.total)
    return tuple(sorted(n for _, _, recomputed in each for n in recomputed)), most


def _of_ranks(
    job: Job, layout: Layout, ranks: Iterable[int], room: float, fused: bool
) -> Iterator[tuple[HeldBytes, WeighedWork, list[int]]]:
    """Of each pipeline rank: what it holds, what it computes, and the layers that it computes again to fit `room`."""
    micro_batches, stages = job.micro_batches(layout), pipeline_stages(job, layout)
    works, helds = _works(job, layout, micro_batches, fused), _helds(job, layout, micro_batches)
    how = "full" if job.recompute in ("", "auto", "full") else job.recompute
    for rank in ranks:
        held, numbers = helds(rank), stages.numbers[rank]
        count = _recomputed(job, held, len(numbers), works, rank, room)
        yield held, works(rank, count, how), numbers[:count]


def largest(found: PeakBytes) -> str:
    """What takes the most, as text."""
    named = sorted(zip(found, found._fields), reverse=True)[:2]
    return ", ".join(f"{name} {size / GIB:.0f}" for size, name in named)


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


def _helds(job: Job, layout: Layout, micro_batches: int) -> Callable[[int], HeldBytes]:
    """rank -> what it holds: computed once for all layouts that cut tensors alike and have as many layers of each kind
    there."""
    stages, last = pipeline_stages(job, layout), layout.pp - 1
    like = ("held", job.blocks.cut(layout, micro_batches), layout.sharding_stage, last > 0, micro_batches > 1)
    known = job.known.setdefault((*like, layout.size > 1), {})

    def held(rank: int) -> HeldBytes:
        numbers = stages.numbers[rank]
        key = (rank == 0, rank == last, len(numbers), stages.sparse[rank])
        if key not in known:
            known[key] = held_of(job, layout, numbers, rank == 0, rank == last, micro_batches)[0]
        found: HeldBytes = known[key]
        return found

    return held


def _works(job: Job, layout: Layout, micro_batches: int, fused: bool) -> Callable[[int, int, str], WeighedWork]:
    """(rank, layers computed again, how) -> what it computes: once for all layouts that cut layers alike."""
    stages, tokens = pipeline_stages(job, layout), job.rows * job.length // layout.cp
    like = ("work", *layers_cut(layout), micro_batches if layout.pp > 1 else 1, fused)
    known = job.known.setdefault(like, {})

    def works(rank: int, count: int, how: str) -> WeighedWork:
        key = (rank, count, how)
        if key not in known:
            work = work_of(job, layout, stages.numbers[rank], rank, micro_batches, tokens, fused)
            known[key] = counted(job.model, recomputing(work, count, how))
        found: WeighedWork = known[key]
        return found

    return works


def _recomputed(
    job: Job, held: HeldBytes, layers: int, works: Callable[[int, int, str], WeighedWork], rank: int, room: float
) -> int:
    """Of a rank's layers those that are computed again: as the recipe sets, or as few as fit."""
    if job.recomputed is not None:
        return min(layers, job.recomputed)
    if job.recompute not in ("", "auto"):
        return layers

    def fits(number: int) -> bool:
        return peak_of(job.model, held, works(rank, number, "full")) * ROUNDING <= room

    if fits(0) or not layers:
        return 0
    low, high = 1, layers
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def held_of(
    job: Job, layout: Layout, numbers: list[int], first: bool, last: bool, micro_batches: int
) -> tuple[HeldBytes, TensorBytes]:
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
    return HeldBytes(
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
) -> RankWork:
    last = rank == layout.pp - 1
    in_flight = 1.0
    if layout.pp > 1:
        in_flight = most_in_flight(layout.pp, layout.virtual_stages, micro_batches, rank)
    return RankWork(
        layers=tuple(job.blocks.sparse[n] for n in numbers),
        tokens=tokens,
        in_flight=in_flight,
        head_rows=job.head_rows if last else 0,
        head_tokens=ceil(tokens * job.trained) if last else 0,
        vocabulary=ceil(job.model.outputs / layout.tp),
        cuts=cuts_of(layout),
        kernels=LayerKernels(fused and job.compute == 2, job.rank, job.compute, job.in_fp8("experts")),
        vision_kept=job.vision_kept / (layout.tp * layout.cp)
        if rank == 0
        else 0.0,  # pictures are dealt out among those ranks
        compared=_compared(job, tokens) if last else 0.0,
    )


def teacher_bytes(job: Job) -> float:
    return float(costs.parameters(job.teacher) * job.compute) if job.teacher is not None else 0.0


def _compared(job: Job, tokens: int) -> float:
    """Of a teacher: its last states of all tokens; and of a chunk of them seven tensors of logits in fp32, of both
    models, their logarithms, probabilities and differences."""
    if job.teacher is None:
        return 0.0
    rows = min(job.head_rows, ceil(tokens * job.trained))
    return tokens * job.teacher.hidden_size * job.compute + 7.0 * 4 * rows * job.teacher.vocab_size


def cuts_of(layout: Layout) -> ActivationCuts:
    rows = 1.0 / layout.tp if layout.experts_over in ("tp", "world") else 1.0
    inside = layout.tp if layout.experts_over in ("none", "data") else 1
    return ActivationCuts(layout.tp, layout.sequence_parallel, inside, rows)


def _worst_rows(job: Job, layout: Layout) -> float:
    """Of a choice's rows, where all tokens choose experts of one rank: it has few of them, and a token takes each
    once."""
    balanced = cuts_of(layout).rows
    if job.model.moe is None or layout.experts_over == "none":
        return balanced
    here = ceil(job.model.moe.experts / layout.expert_ranks)
    senders = layout.expert_ranks if layout.experts_over_data else layout.tp
    return balanced * senders * min(1.0, here / job.model.moe.choices)
