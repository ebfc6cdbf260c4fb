"""`erniekit plan RECIPE --cluster 8x80G`: which layouts fit, how fast each would be, and what else could be changed.

In the command table. Says what it is about to do before torch is imported; needs no device and no weights.
"""

from __future__ import annotations

import atexit
import gc
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig, load
from erniekit.devices.islands import parse_islands
from erniekit.early_imports import without_collections
from erniekit.errors import ConfigError, PlanError
from erniekit.files.marked_file import state_of, write_marked
from erniekit.log import emit
from erniekit.models import costs
from erniekit.parallel.layout import CONFIG_KEYS
from erniekit.planner.cards import rates_of
from erniekit.planner.cluster import FIX, Cluster, parse
from erniekit.printable import counted
from erniekit.recipes.plan_timeline import draw, timeline_target

if TYPE_CHECKING:
    from erniekit.planner.device_pool import DevicePool
    from erniekit.planner.evaluate import Candidate
    from erniekit.planner.job import Job
    from erniekit.planner.search import Ranking

HOPPER = ("h200", "h100", "h800", "h20")  # cards that FlashAttention-4 is for
MARK = "# written by `erniekit plan`"
OPTIONS = ("--cluster", "--write", "--take", "--calibration", "--packs", "--top", "--timeline")
# What decides a layout: of the recipe's own none is left in a written one, whose layout is the planned one alone.
DECIDED = frozenset({
    *CONFIG_KEYS.values(), "sep_parallel_degree", "sharding", "sequence_parallel", "virtual_pp_degree", "pp_seg_method",
    "islands", "moe_group", "expert_parallel_degree", "expert_tensor_parallel_degree", "use_expert_parallel",
    "recompute", "recompute_granularity", "no_recompute_layers",
})  # fmt: skip


def plan_command(args: list[str]) -> int:
    """Without collection of garbage: a search drops its objects by their counts, and a collector would go through all
    that torch has made again and again, for a tenth of the time."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # nor a last time when the process ends
    with without_collections():
        return _plan(args)


def _plan(args: list[str]) -> int:
    began = time.perf_counter()
    words, given, as_json = _options(args)
    cluster = parse(given.get("--cluster") or _missing())
    calibrated = _calibration(given.get("--calibration"))
    packs = _number(given, "--packs")
    cfg = load(words, "train")
    _refuse_other_islands(cfg, cluster)
    target = _target(given.get("--write"))
    picture = timeline_target(given.get("--timeline"))
    take = _number(given, "--take") or 1
    if "--take" in given and target is None:
        raise ConfigError("--take needs --write", where="--take", fix="add --write FILE")
    if not as_json:
        emit(f"plan     {', '.join(cfg.files) or cfg.model.model_name_or_path} on {cluster.describe()}")
    top = _number(given, "--top") or 0
    result, ranked, job = _planned(cfg, cluster, calibrated, packs, as_json, top, take)
    result["seconds"] = time.perf_counter() - began
    best = result["ranked"][0] if result["ranked"] else None
    if target is not None:
        if best is None:
            raise PlanError("no layout fits: nothing is written", where=f"--write {target}", fix=result["advice"])
        if take > len(result["ranked"]):
            count = len(result["ranked"])
            raise PlanError(f"no layout {take}: {count} fit", where=f"--take {take}", fix=f"a number up to {count}")
        taken = result["ranked"][take - 1]
        write(target, cfg, taken["keys"], cluster)
        result["written"], result["taken"] = str(target), take
    if picture is not None and ranked:
        result["timeline"] = draw(picture, ranked, job.schedule, quiet=as_json)
    if as_json:
        print(json.dumps(result, indent=1))
    elif target is not None:
        emit(f"written  {target}: layout {take}, {taken['layout']}; train with `erniekit train {target}`")
    if best is None and not as_json:
        raise PlanError(
            f"no layout of this run fits {cluster.describe()}", where=f"--cluster {cluster.text}", fix=result["advice"]
        )
    return 0 if best else 2


def _planned(
    cfg: RunConfig,
    cluster: Cluster,
    calibrated: dict[str, Any] | None,
    packs: int | None,
    quiet: bool,
    top: int,
    take: int,
) -> tuple[dict[str, Any], list[Candidate], Job]:
    """What a program reads, the layouts that fit, and the run in numbers."""
    from erniekit.planner import report
    from erniekit.planner.device_pool import DevicePool
    from erniekit.planner.evaluate import evaluate
    from erniekit.planner.islands import across
    from erniekit.planner.search import search, smallest
    from erniekit.recipes.planning import job_of, own_layout, packs_of, shape_of

    shape = shape_of(cfg)
    job = job_of(cfg, shape, packs or packs_of(cfg, cluster.size))
    pools = [DevicePool(i.card, rates_of(i.card, calibrated), i.devices) for i in cluster.islands]
    pool = pools[0]
    if not quiet:
        _show_job(cfg, job, shape.source, pool)
    if len(cluster.islands) > 1:
        found = across(job, cluster, pools)
        own = None
    else:
        found = search(job, pool, cluster.size, max(top, take))
        layout = own_layout(cfg, cluster.size)
        own = evaluate(job, layout, pool, exact=True) if layout is not None else None
    prices = _prices(cfg, job, pool, found) if len(cluster.islands) == 1 else []
    fewest = smallest(job, pool, cluster.size) if len(cluster.islands) == 1 else None
    advice = _advice(found, prices, fewest, pool, job)
    if not quiet:
        _show(found, own, prices, fewest, pool, top or report.SHOWN)
    result = {
        "cluster": cluster.describe(),
        "ranks": cluster.size,
        "packs_per_step": job.packs,
        "notes": list(_notes(cfg, pool)),
        "rates": dict(pool.rates.source),
        "tried": found.tried,
        "ranked": [report.as_json(one) for one in found.ranked[: max(top or 20, take)]],
        "own": report.as_json(own) if own is not None else None,
        "rejected": {name: {"layouts": count, "why": why} for name, (count, why) in found.failed.items()},
        "levers": [
            {"keys": keys, "tokens_per_second": t, "gib": gib, "costs": loses} for keys, t, gib, loses in prices
        ],
        "smallest": fewest,
        "advice": advice,
    }
    return result, found.ranked, job


def _refuse_other_islands(cfg: RunConfig, cluster: Cluster) -> None:
    """A recipe that names its islands is planned on those."""
    named = [island.ranks for island in parse_islands(cfg.parallel.islands)]
    if named and named != [island.size for island in cluster.islands]:
        raise ConfigError(
            f"islands names {' + '.join(map(str, named))} ranks, and the cluster is {cluster.describe()}",
            where=f"{cfg.origin('islands')} and --cluster {cluster.text}",
            fix="a YAML with the same islands behind --cluster, or islands= to plan without them",
        )


def _show_job(cfg: RunConfig, job: Job, source: str, pool: DevicePool) -> None:
    from erniekit.data.report import short
    from erniekit.planner import report

    how = f"LoRA rank {job.rank}" if job.rank else "all weights"
    if job.teacher is not None:
        how += f", a teacher of {short(costs.parameters(job.teacher))} on every rank"
    emit(
        f"job      {short(costs.parameters(job.model))} weights ({source}), {cfg.train.stage}, {how}, "
        f"{counted(job.packs, 'sequence')} of {job.length:,} tokens per step, {job.rows} in a micro-batch"
    )
    for text in _notes(cfg, pool):
        emit(f"note     {text}")
    emit(f"rates    {report.sources(pool.rates)}")


def _notes(cfg: RunConfig, pool: DevicePool) -> Iterator[str]:
    """What a run of this recipe does beyond the job that is planned, and what is taken to be so."""
    from erniekit.planner.timing import SLOWER_ATTENTION
    from erniekit.recipes import other_models

    if not cfg.data.packing and cfg.train.stage != "PT":
        yield (
            f"each row is planned as max_seq_len = {cfg.data.max_seq_len:,} tokens (packing: False; no data is read): "
            "the most that it can take; if yours are shorter, max_seq_len=LENGTH plans rows of that length"
        )
    teacher = cfg.distill.teacher_model_name_or_path
    if teacher and other_models.teacher_of(cfg) is None:
        yield f"not counted: the teacher's weights and forward pass on every rank; {teacher} has no config.json here"
    if cfg.train.stage in ("DPO", "KTO") and cfg.dpo.reference_logps == "cached":
        yield "not counted: the pass over all rows before the first step (reference_logps: cached)"
    if cfg.train.stage == "CLS" and not cfg.score.class_labels:
        yield "not counted: a score head of more than 2 classes, unless the model has one (class_labels names them)"
    if cfg.train.eval_generate:
        yield "not counted: answers that evaluations generate (eval_generate)"
    if other_models.spread_over_data_only(cfg):
        yield "only layouts of data parallelism and sharding are planned: this run accepts no others"
    if pool.card.name.lower() in HOPPER and cfg.model.attention == "auto":
        yield (
            "attention is planned as FlashAttention-4 computes it (extra flash4); without it rows spend "
            f"{SLOWER_ATTENTION['rows']:.1f} times as long there, packs {SLOWER_ATTENTION['flash']:.1f} times"
        )


def _show(
    found: Ranking, own: Candidate | None, prices: list[Any], fewest: int | None, pool: DevicePool, top: int
) -> None:
    from erniekit.planner import report

    room = f"the {pool.room / 2**30:.0f} GiB that a rank may fill"
    emit(f"layouts  {found.tried} counted, {len(found.ranked)} fit {room}")
    if found.ranked:
        for line in (*report.table(found.ranked, top), "", *report.bytes_table(found.ranked[0])):
            emit(f"  {line}" if line else "")
    if own is not None:
        fate = own.problem or f"{own.tokens:,.0f} tokens/s, {own.most.total / 2**30:.0f} GiB a rank"
        emit(f"recipe's {own.layout.describe()}: {fate}")
    for title, lines in (("rejected", report.rejected(found)), ("levers", report.lever_lines(prices))):
        for k, line in enumerate(lines):
            emit(f"{title if k == 0 else '':<9}{line}")
    if fewest:
        emit(f"smallest {fewest} of these devices")


def _prices(
    cfg: RunConfig, job: Job, pool: DevicePool, found: Ranking
) -> list[tuple[dict[str, Any], float | None, float, str]]:
    """Each change that helps, by itself, on the best layout, or on the one that is nearest to fitting."""
    from erniekit.planner.evaluate import evaluate
    from erniekit.recipes.planning import levers

    one = found.ranked[0] if found.ranked else found.nearest
    if one is None:
        return []
    out = []
    for lever in levers(cfg, job):
        made = evaluate(lever.job, one.layout, pool, exact=True)
        if made.stages and _helps(made, one):
            tokens = None if made.problem else made.tokens
            out.append((lever.keys, tokens, made.most.total / 2**30, lever.loses))
    return out


def _helps(made: Candidate, before: Candidate) -> bool:
    """Less memory, or with the memory that it frees more speed."""
    smaller = made.most.total < 0.995 * before.most.total
    faster = not made.problem and not before.problem and made.tokens > 1.005 * before.tokens
    return smaller or faster or (bool(before.problem) and not made.problem)


def _advice(found: Ranking, prices: list[Any], fewest: int | None, pool: DevicePool, job: Job) -> str:
    """One change that fits, and none that was counted and does not."""
    if found.ranked:
        return ""
    if not found.tried:
        return f"{found.failed['any'][1]}: give --packs"
    fits = [(tokens, keys) for keys, tokens, _, _ in prices if tokens is not None]
    if fits:
        return "set " + ", ".join(f"{key}: {value}" for key, value in max(fits, key=lambda item: item[0])[1].items())
    if fewest:
        return f"use {fewest} of these devices ({pool.card.name})"
    more = "use cards with more memory"
    if not job.rank:
        return f"{more}, or fine_tuning: LoRA with frozen_base: wint4/8"
    if not prices and job.base != "wint4/8":  # of islands no change is priced
        return f"{more}, or frozen_base: wint4/8"
    least = min((gib for _, _, gib, _ in prices), default=None)
    room = f"{pool.room / 2**30:.1f} that it may fill"
    return more if least is None else f"{more}: the change that saves most leaves {least:.1f} GiB a rank, of {room}"


def write(target: Path, cfg: RunConfig, keys: dict[str, Any], cluster: Cluster) -> None:
    """A recipe of its own: the planned layout after the recipe's other keys."""
    import yaml

    values = {name: cfg[name] for name in cfg.flat() if cfg.given(name) and name not in DECIDED}
    values |= keys
    if len(cluster.islands) > 1:  # its default follows the device, and ranks must compute alike
        values.setdefault("compute_type", cfg.precision.compute_type)
    clean = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}
    body = yaml.safe_dump(clean, sort_keys=False)
    about = f" for {cluster.describe()}; the layout is at the end"
    write_marked(target, MARK, about, body, lambda: _refuse_edited(target))


def _target(word: str | None) -> Path | None:
    """Before anything is computed: a file that is there and not ours is left alone."""
    if word is None:
        return None
    target = Path(word).expanduser()
    if not target.parent.is_dir():
        raise ConfigError(f"no folder {target.parent}", where=f"--write {word}", fix="create it, or name another file")
    _refuse_edited(target)
    return target


def _refuse_edited(target: Path) -> None:
    state = state_of(target, MARK)
    if state == "foreign":
        what = f"{target} exists and was not written by `erniekit plan`"
        raise ConfigError(what, where=f"--write {target}", fix="name a new file")
    if state == "edited":
        what = f"{target} was changed since `erniekit plan` wrote it, and would be replaced"
        raise ConfigError(what, where=f"--write {target}", fix="name a new file, or move this one away")


def _calibration(word: str | None) -> dict[str, Any] | None:
    from erniekit.files import read_object

    if word is None:
        return None
    try:
        found = read_object(Path(word).expanduser(), ConfigError)
    except FileNotFoundError:
        raise ConfigError(
            f"no file {word}", where="--calibration", fix="write one with `erniekit bench --calibrate`"
        ) from None
    if found.get("format") != "erniekit-calibration-1":
        raise ConfigError("not a calibration file", where=word, fix="write one with `erniekit bench --calibrate`")
    return dict(found)


def _number(given: dict[str, str], option: str) -> int | None:
    word = given.get(option)
    if word is None:
        return None
    if not re.fullmatch("[0-9]{1,12}", word) or not int(word):
        raise ConfigError(f"{option} {word} is not a number above 0", where="erniekit plan", fix=f"{option} 64")
    return int(word)


def _missing() -> str:
    raise ConfigError("which cluster?", where="erniekit plan", fix=f"--cluster: {FIX}")


def _options(args: list[str]) -> tuple[list[str], dict[str, str], bool]:
    """(words for the config, our options, --json)."""
    words: list[str] = []
    given: dict[str, str] = {}
    as_json, rest = False, iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if word == "--json":
            as_json = True
        elif name in OPTIONS:
            text = value if equals else next(rest, "")
            if not text:
                raise ConfigError(f"{name} has no value", where="erniekit plan", fix="erniekit plan --help")
            given[name] = text
        else:
            words.append(word)
    return words, given, as_json
