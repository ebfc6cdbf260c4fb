"""How many layers each stage of a pipeline over unlike devices has: by how long a layer takes there, and what fits.

Called by recipes/island_stages.py before a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from erniekit.errors import PlanError
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import layer_products
from erniekit.parallel.layout import Layout
from erniekit.planner.evaluate import held_of, work_of
from erniekit.planner.job import Job
from erniekit.planner.memory import GIB, USABLE, PeakBytes, recomputing, rounded, step_bytes


def even_time(seconds: Sequence[float], extra: Sequence[float], most: Sequence[int], layers: int) -> list[int]:
    """Layers of each stage such that the slowest stage is as fast as can be. seconds: of a layer there; extra: of what
    a stage has besides its layers; most: layers that it may have, at least one. Each layer goes where it ends first;
    that is exact, as no other choice makes the slowest stage faster."""
    counts = [1] * len(seconds)
    for _ in range(layers - len(seconds)):
        free = [s for s in range(len(seconds)) if counts[s] < most[s]]
        if not free:
            raise PlanError(
                f"the model's {layers} layers do not fit: at most {sum(most)} do",
                where="islands",
                fix="more ranks, recompute: True, or fine_tuning: LoRA with frozen_base: wint4/8",
            )
        counts[min(free, key=lambda s: ((counts[s] + 1) * seconds[s] + extra[s], s))] += 1
    return counts


def head_in_layers(c: DecoderConfig) -> float:
    """The head's products, as a number of layers."""
    layer = sum(p.weights_met for p in layer_products(c, c.moe is not None))
    return c.vocab_size * c.hidden_size / layer if layer else 0.0


def fitted(
    job: Job, layout: Layout, seconds: Sequence[float], rooms: Sequence[float], triton: Sequence[bool]
) -> tuple[list[int], list[PeakBytes]]:
    """Layers of each stage, and what a rank there holds. seconds, rooms (bytes of a device) and triton: of each stage's
    devices. A stage that would not fit has fewer layers, and the others take them."""
    c, stages = job.model, layout.pp
    extra = [0.0] * (stages - 1) + [seconds[-1] * head_in_layers(c)]
    most = [c.num_layers] * stages
    while True:
        counts = even_time(seconds, extra, most, c.num_layers)
        found = stage_bytes(job, layout, counts, triton)
        over = [s for s in range(stages) if found[s].total > USABLE * rooms[s] > 0]
        if not over:
            return counts, found
        for s in over:
            if counts[s] == 1:
                raise PlanError(
                    f"one layer in stage {s} takes {found[s].total / GIB:.1f} GiB of the "
                    f"{USABLE * rooms[s] / GIB:.1f} that are usable",
                    where="islands",
                    fix="a shorter max_seq_len, recompute: True, or more tensor_parallel_degree",
                )
            most[s] = counts[s] - 1


def stage_bytes(job: Job, layout: Layout, counts: Sequence[int], triton: Sequence[bool]) -> list[PeakBytes]:
    m = job.micro_batches(layout)
    bounds = [0, *accumulate(counts)]
    tokens = job.rows * job.length // layout.cp
    out = []
    for rank in range(len(counts)):
        numbers = list(range(bounds[rank], bounds[rank + 1]))
        held, _ = held_of(job, layout, numbers, rank == 0, rank == len(counts) - 1, m)
        work = work_of(job, layout, numbers, rank, m, tokens, triton[rank])
        again = len(numbers) if job.recompute not in ("", "auto") else 0
        out.append(rounded(step_bytes(job.model, held, recomputing(work, again))))
    return out
