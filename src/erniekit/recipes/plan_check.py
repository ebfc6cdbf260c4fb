"""The plan next to what happened: a line at the end of a run, and on out-of-memory what was on the card and what fits.

Called by training.py, finish.py and rehearse_command.py. Nothing here may end a run: where no plan can be made, less is
printed.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from erniekit.config import RunConfig
from erniekit.devices.base import GIB, Device
from erniekit.errors import DeviceError, ErnieKitError
from erniekit.kernels.selection import AttentionFacts, chosen
from erniekit.parallel.layout import Layout
from erniekit.parallel.world import ranks_started
from erniekit.planner.cards import CARDS, Card, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate, evaluate, largest
from erniekit.planner.job import Job
from erniekit.planner.step_time import alone, pipeline_stages
from erniekit.recipes import planning
from erniekit.recipes.run_plan import RunPlan
from erniekit.train.metrics import StepStatistics

MEASURED_CAPABILITY = 9  # of cards whose kernels of attention were compared


def card_of(device: Device) -> Card | None:
    """The data sheet of the device at hand; None: only its memory is known."""
    parts = device.name.lower().replace("-", " ").split()
    return next((card for name, card in CARDS.items() if name in parts), None)


def pool_of(device: Device, devices: int) -> DevicePool:
    card = card_of(device) or replace(CARDS["a100"], triton=device.triton)
    card = replace(card, memory=float(device.total_memory or card.memory))
    return DevicePool(card, rates_of(card), devices)


def job_at_hand(cfg: RunConfig, plan: RunPlan | None, layout: Layout) -> Job:
    """Of a run that was decided: its own model and its own recompute."""
    shape = planning.shape_of(cfg) if plan is None else planning.shape_in(cfg, plan.folder, plan.lora)
    job = replace(planning.job_in(cfg, shape, layout), replayed=bool(cfg.model.cuda_graph))
    kept = cfg.memory.no_recompute_layers
    if cfg.memory.recompute and kept:
        again = [sum(n not in kept for n in held) for held in pipeline_stages(job, layout).numbers]
        job = replace(job, recomputed=max(again))
    elif not cfg.memory.recompute:
        job = replace(job, recomputed=0)
    return job if plan is None else with_attention_of(plan, job)


def with_attention_of(plan: RunPlan, job: Job) -> Job:
    """By the kernels that compute it on this device, where the planner knows how they differ."""
    if (plan.device.capability() or (0,))[0] != MEASURED_CAPABILITY or plan.config.model.attention != "auto":
        return job
    c = plan.folder.config
    facts = AttentionFacts(plan.device.handle, c.num_heads // c.num_kv_heads, c.head_dim, dtype=plan.dtype)
    return replace(job, attention=chosen("attention", facts), packed_attention=chosen("packed attention", facts))


def predicted_alone(plan: RunPlan, micro_batches: int) -> tuple[Candidate, float]:
    """Of a rank that is rehearsed for real: the run's plan, and the seconds of its step of so many micro-batches with
    nothing sent; 0 where the run cannot be."""
    layout, place = plan.world.layout, _place(plan)
    job = job_at_hand(plan.config, plan, layout)
    made = evaluate(job, layout, place, exact=True)
    rank = plan.world.at["pp"]
    return made, alone(job, layout, rank, micro_batches, made.again, place) if made.stages else 0.0


def _place(plan: RunPlan) -> DevicePool:
    pool = pool_of(plan.device, max(1, plan.world.size // max(1, len(plan.world.leaders))))
    return replace(pool, limit=float("inf"))


def comparison(own: float, peak: float, planned: float, measured: float) -> str:
    """One line: the plan against what was measured, in bytes and tokens a second. planned 0: the card's rates are not
    known."""
    line = f"memory {own / GIB:.1f} GiB planned, {peak / GIB:.1f} at the most ({own / peak - 1:+.0%})"
    if planned and measured:
        line += f"; {planned:,.0f} tokens/s planned, {measured:,.0f} measured ({planned / measured - 1:+.0%})"
    return line


def as_it_was(job: Job, layout: Layout, usual: StepStatistics) -> Job:
    """With the rows that a run had: memory is planned for full ones, time for the usual one."""
    multiple = layout.length_multiple
    length = min(job.length, ceil(usual.pack / multiple) * multiple)
    return replace(job, length=length, document=round(usual.document), trained=usual.trained)


def line_of(plan: RunPlan, usual: StepStatistics | None) -> str | None:
    """At the end of a run on a device that counts its memory; None elsewhere."""
    peak = plan.device.peak_allocated() if plan.device.counts_memory else 0
    if not peak:
        return None
    try:
        layout, place = plan.world.layout, _place(plan)
        job = job_at_hand(plan.config, plan, layout)
        made = evaluate(job, layout, place, exact=True)
        if usual is None or card_of(plan.device) is None:
            return comparison(made.most.allocated, peak, 0.0, 0.0)
        timed = evaluate(as_it_was(job, layout, usual), layout, place, exact=True)
        return comparison(made.most.allocated, peak, timed.tokens, usual.speed)
    except (ErnieKitError, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # the run is done: a plan that cannot be made is no fault of it


def out_of_memory(cfg: RunConfig, device: Device) -> DeviceError:
    """What a user reads instead of the allocator's report."""
    has = f"{device.total_memory / GIB:.0f} GiB" if device.total_memory else "its memory"
    what = f"{device.name} has {has}, and this run needs more"
    if device.counts_memory:
        what += f": {device.peak_allocated() / GIB:.0f} GiB were allocated when it ran out"
    try:
        ranks = ranks_started()
        layout = planning.own_layout(cfg, ranks) or Layout(dp=ranks)
        pool = pool_of(device, ranks)
        job = job_at_hand(cfg, None, layout)
        made = evaluate(job, layout, replace(pool, limit=float("inf")))
        where = f"planned {made.most.total / GIB:.0f} GiB: {largest(made.most)} ({layout.describe()})"
        return DeviceError(what, where=where, fix=change_that_fits(cfg, job, layout, pool))
    except (ErnieKitError, ArithmeticError, LookupError, TypeError, ValueError):
        return DeviceError(what, where="memory", fix="recompute: True, a smaller max_seq_len or batch_size")


def change_that_fits(cfg: RunConfig, job: Job, layout: Layout, pool: DevicePool) -> str:
    """The single change that costs least, else the two that free most."""
    found = []
    for lever in planning.levers(cfg, job):
        tried = lever.job if "recompute" not in lever.keys else replace(lever.job, recomputed=None)
        made = evaluate(tried, layout, pool)
        keys = ", ".join(f"{key}: {value}" for key, value in lever.keys.items())
        if made.stages and not made.problem:
            return f"set {keys} ({made.most.total / GIB:.0f} GiB)"
        found += [(made.most.total, keys)] if made.stages else []
    best = " and ".join(keys for _, keys in sorted(found)[:2])
    return f"`erniekit plan` shows what fits; no single key does, most is freed by {best or 'sharding: stage3'}"
