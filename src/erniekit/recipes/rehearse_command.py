"""`erniekit rehearse RECIPE`: every rank of a run at full size before there is a cluster; with --rank one of them for
real, with --shrunken the whole run small. In the command table."""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig, load
from erniekit.config.machines import machines
from erniekit.errors import ConfigError, PlanError
from erniekit.log import emit
from erniekit.printable import counted
from erniekit.recipes import rehearsed_timeline

if TYPE_CHECKING:
    from erniekit.devices.base import Device
    from erniekit.parallel.layout import Layout
    from erniekit.recipes.rehearsal import Rehearsal
    from erniekit.recipes.rehearsed_timeline import Wanted

# A rank takes some microseconds, and a micro-batch some milliseconds: more is a mistyped number.
MOST = {"--ranks": 100_000, "--micro-batches": 10_000}
NUMBERS = ("--ranks", "--micro-batches", "--rank", "--shrunken")
FLAGS = ("--every-rank", "--json")
OF_FULL_SIZE = ("--rank", "--micro-batches", "--every-rank", "--json")  # nothing that --shrunken could do


def rehearse_command(args: list[str]) -> int:
    began = time.perf_counter()
    args, timeline = rehearsed_timeline.options(args)
    arguments, numbers, flags = _options(args)
    if timeline is not None and (other := sorted({"--rank", "--shrunken"} & numbers.keys())):
        why = f"--timeline shows all ranks at full size, and {other[0]} does not run them"
        raise ConfigError(why, where="erniekit rehearse", fix=f"leave one of --timeline and {other[0]} out")
    cfg = load(arguments, "train")
    what = ", ".join(cfg.files) or cfg.model.model_name_or_path
    if "--shrunken" in numbers:
        emit(f"rehearse {what}, made small")
        from erniekit.recipes.shrunken import train_shrunken

        ranks, _ = wanted_ranks(cfg, numbers.get("--ranks"))
        layout = None if ranks is None else layout_on(cfg, numbers.get("--ranks"))
        return train_shrunken(cfg, arguments, numbers["--shrunken"], layout)
    layout = layout_on(cfg, numbers.get("--ranks"))
    _, source = wanted_ranks(cfg, numbers.get("--ranks"))
    if timeline is not None:
        rehearsed_timeline.placed(timeline, layout.size)  # a cluster that is too small is refused at once
    quiet = "--json" in flags
    if not quiet:
        why = f"; {source}" if source else ""
        emit(f"rehearse {what} on {counted(layout.size, 'rank')}: {layout.describe()}{why}")
    with tempfile.TemporaryDirectory(prefix="erniekit-rehearse-") as folder:
        from erniekit.recipes import rehearsal

        job = rehearsal.prepare(cfg, layout, Path(folder), numbers.get("--micro-batches", 0))
        if "--rank" in numbers:
            result = _one_rank(job, numbers["--rank"], quiet)
        else:
            result = _all_ranks(job, "--every-rank" in flags, quiet, timeline)
    result["seconds"] = time.perf_counter() - began
    if quiet:
        print(json.dumps(result, indent=1))
    return 1 if result.get("findings") else 0


def wanted_ranks(cfg: RunConfig, asked: int | None) -> tuple[int | None, str]:
    """How many there are to be, and what says so where it is the launcher's keys. None: as many as the degrees need."""
    nproc, nnodes = cfg.launch.nproc_per_node, machines(cfg)
    if asked is not None or nproc is None:
        return asked, ""
    by = "" if cfg.launch.nnodes else ", as NNODES says"
    several = f" on {nnodes} machines{by}" if nnodes > 1 else ""
    return nproc * nnodes, f"nproc_per_node is {nproc}{several} ({cfg.origin('nproc_per_node')})"


def layout_on(cfg: RunConfig, asked: int | None) -> Layout:
    """asked: how many ranks, where --ranks says so."""
    ranks, source = wanted_ranks(cfg, asked)
    try:
        return _layout(cfg, ranks)
    except PlanError as error:
        if not source:
            raise
        fix = f"{error.fix}; --ranks N rehearses another number"
        raise PlanError(error.what, where=f"{error.where}; {source}", fix=fix) from error


def _layout(cfg: RunConfig, ranks: int | None) -> Layout:
    from erniekit.parallel.layout import AXES, fit
    from erniekit.parallel.world import layout_of

    if ranks is None:
        if cfg.parallel.sharding_parallel_degree < 1:
            raise PlanError(
                "the recipe shards over all ranks there are: how many?",
                where="sharding_parallel_degree",
                fix="--ranks 8, or sharding_parallel_degree=8",
            )
        own = layout_of(cfg.parallel, 1, cfg.moe.moe_group)
        ranks = math.prod(getattr(own, axis) for axis in AXES)
    return fit(ranks, layout_of(cfg.parallel, ranks, cfg.moe.moe_group))


def _all_ranks(job: Rehearsal, every: bool, quiet: bool, timeline: Wanted | None = None) -> dict[str, Any]:
    from erniekit.recipes.rehearsal import shapes_of
    from erniekit.recipes.rehearsed_ranks import record_all
    from erniekit.rehearse.blocking import deadlock
    from erniekit.rehearse.calls import P2P
    from erniekit.rehearse.compare import compare
    from erniekit.rehearse.ranks import everyone, kinds

    layout = job.layout
    alike = [[rank] for rank in range(layout.size)] if every else kinds(layout, shapes_of(job))
    of = max(1, job.config.train.gradient_accumulation_steps)
    step = f"{job.micro_batches} of {counted(of, 'micro-batch', 'micro-batches')}"
    if not quiet:
        emit(f"kinds    {len(alike)} among {counted(layout.size, 'rank')}; {step}")
    job = replace(job, timed=timeline is not None)
    recorded, findings = record_all(job, [group[0] for group in alike], quiet)
    calls = messages = groups = 0
    more: dict[str, Any] = {}
    if not findings:
        traces = everyone(layout, recorded, alike)
        findings = compare(traces)
        stuck = deadlock(traces)
        findings += [stuck] if stuck is not None else []
        made = [call for trace in traces.values() for call in trace.calls]
        messages = sum(call.op in P2P for call in made)
        calls, groups = len(made) - messages, len({call.group for call in made})
    if not quiet:
        emit(f"calls    {calls:,} to collectives and {counted(messages, 'message')} in {counted(groups, 'group')}")
        for finding in findings:
            for k, line in enumerate(finding.text()):
                emit(f"{'fault' if k == 0 else '':<9}{line}")
        if not findings:
            emit("result   all ranks' calls match, and none waits for ever")
    if timeline is not None and not findings:
        more["timeline"] = rehearsed_timeline.show(timeline, traces, alike, step, quiet)
    return {
        "ranks": layout.size,
        "layout": layout.describe(),
        "kinds": len(alike),
        "micro_batches": job.micro_batches,
        "collectives": calls,
        "messages": messages,
        "findings": [{"ranks": list(f.ranks), "what": f.what, "calls": list(f.lines)} for f in findings],
        **more,
    }


def _one_rank(job: Rehearsal, rank: int, quiet: bool) -> dict[str, Any]:
    import torch

    from erniekit.devices import pick
    from erniekit.devices.base import GIB
    from erniekit.planner.evaluate import largest
    from erniekit.recipes.plan_check import card_of, predicted_alone
    from erniekit.recipes.rehearsal import measured, plan_for, unreported

    if rank >= job.layout.size:
        there = f"there {'is' if job.layout.size == 1 else 'are'} {counted(job.layout.size, 'rank')}"
        raise ConfigError(f"--rank {rank}: {there}", where="erniekit rehearse", fix="ranks count from 0")
    device = pick(job.config.train.device, job.config.train.no_cuda)
    plan, seconds = predicted_alone(plan_for(job, rank, device), job.micro_batches)
    stage = plan.stages[job.layout.coords(rank)["pp"]] if plan.stages else None
    planned = stage.allocated if stage is not None else 0.0
    if stage is not None and device.total_memory and planned > device.total_memory:
        raise _too_large(job, rank, device, f"{planned / GIB:.0f} GiB planned: {largest(stage)}")
    try:
        found = measured(job, rank, device, report=unreported if quiet else emit)
    except torch.OutOfMemoryError:
        reason = f"{device.peak_allocated() / GIB:.0f} GiB were allocated when it ran out, {planned / GIB:.0f} planned"
        raise _too_large(job, rank, device, reason) from None
    known = card_of(device) is not None
    if not quiet:
        peak = f"{found.peak / GIB:.1f} GiB at the most" if found.peak else f"{device.name} does not count its memory"
        emit(f"memory   rank {rank}: {peak}; {planned / GIB:.1f} GiB planned")
        step = counted(job.micro_batches, "micro-batch", "micro-batches")
        rates = f"{seconds:.2f} s planned" if known else "no plan: rates of this device are not known"
        emit(f"time     {found.seconds:.2f} s a step of {step}, nothing sent; {rates}")
    return {
        "rank": rank,
        "device": device.name,
        "micro_batches": job.micro_batches,
        "peak_bytes": found.peak,
        "planned_bytes": planned,
        "seconds_a_step": found.seconds,
        "planned_seconds": seconds if known else None,
        "calls": len(found.trace.calls),
    }


def _too_large(job: Rehearsal, rank: int, device: Device, why: str) -> PlanError:
    return PlanError(
        f"rank {rank} of {job.layout.size} does not fit {device.name} ({device.total_memory / 2**30:.0f} GiB)",
        where=f"{why} ({job.layout.describe()})",
        fix="`erniekit plan` shows the cluster and the keys that fit; a shorter max_seq_len; --rank of another stage",
    )


def _options(args: list[str]) -> tuple[list[str], dict[str, int], set[str]]:
    """(arguments of the config, our numbers, our flags)."""
    arguments: list[str] = []
    numbers: dict[str, int] = {}
    flags, rest = set(), iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in FLAGS:
            flags.add(name)
        elif name in NUMBERS:
            text = value if equals else next(rest, "")
            number = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
            if number < (least := 0 if name == "--rank" else 1):
                what = f"{name} {text}: not a whole number from {least}" if text else f"{name} has no number"
                raise ConfigError(what, where="erniekit rehearse", fix=f"{name} 8")
            if number > (most := MOST.get(name, number)):
                what = f"{name} {number:,} is more than is rehearsed"
                raise ConfigError(what, where="erniekit rehearse", fix=f"at most {most:,}")
            numbers[name] = number
        else:
            arguments.append(argument)
    if "--shrunken" in numbers and (other := next((f for f in OF_FULL_SIZE if f in numbers or f in flags), None)):
        raise ConfigError(
            f"{other} does nothing with --shrunken, which trains the run small",
            where="erniekit rehearse",
            fix="leave out one of them; --shrunken takes --ranks N, the ranks of the run that is made small",
        )
    return arguments, numbers, flags
