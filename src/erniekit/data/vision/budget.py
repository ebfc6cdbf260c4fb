"""What the pictures of a dataset file cost, from headers only: tokens and patches a row, what max_pixels buys, and
which rows max_seq_len would cut. `erniekit data` calls it for rows with pictures; no pixel is decoded."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import Detected, parsed, rows
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import MediaHeader
from erniekit.data.media.limits import MediaError
from erniekit.data.media.worker import MediaPool
from erniekit.data.preference import PairRules
from erniekit.data.report import short, unused_line
from erniekit.data.settings_files import read_settings
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import RowProblem
from erniekit.data.vision.layout import HeaderOf, headers_from, seen, tokens_of
from erniekit.data.vision.pairs import VisionPair, VisionPairAssembler, read_vision_pair
from erniekit.data.vision.read import read_vision_row
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.data.vision.vision_row import GivenMedium, VisionRow
from erniekit.errors import ConfigError
from erniekit.printable import counted
from erniekit.progress import WorkProgress

_SHOWN = 20  # rows of each kind
_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of max_pixels
_AHEAD = 64  # rows whose headers are read at a time


@dataclass
class VisionBudget:
    pairs: bool = False  # rows compare two answers
    rows: int = 0
    bad: list[RowProblem] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    pictures: int = 0
    videos: int = 0
    tokens: list[int] = field(default_factory=list)  # of pictures, a row
    patches: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)  # all tokens of a row, where a tokenizer is given
    too_long: list[tuple[int, int]] = field(default_factory=list)  # line, tokens
    cut: int = 0  # rows that lose turns
    at: dict[float, int] = field(default_factory=dict)  # tokens of all media, by share of max_pixels


@dataclass(frozen=True)
class _Costs:
    line: int
    row: VisionRow
    tokens: int
    patches: int
    videos: int
    at: dict[float, int]
    whole: int = 0
    dropped: bool = False
    cut: bool = False


def model_rules(model: Path | None, max_pixels: int | None) -> VisionRules:
    sizes = VisionRules.sizes_of(read_settings(model / "preprocessor_config.json")) if model else {}
    if max_pixels is not None:
        sizes |= {"max_pixels": max_pixels, "video_max_pixels": max_pixels}
    rules = replace(VisionRules(), **sizes)  # type: ignore[arg-type]
    least = max(rules.min_pixels, rules.video_min_pixels)
    if max_pixels is not None and max_pixels < least:
        raise ConfigError(
            f"--pixels is {max_pixels:,}, and no picture has less than {least:,} (min_pixels)",
            where="erniekit data",
            fix=f"--pixels {least} or more",
        )
    return rules


def measure(
    path: str, found: Detected, rules: VisionRules, max_seq_len: int, tokenizer: Tokenizer | None
) -> VisionBudget:
    out = VisionBudget(pairs=found.preference)
    count = min(8, os.cpu_count() or 1)
    bar = WorkProgress(f"checking {Path(path).name}", None, "rows")
    with MediaPool(count, rules.limits) as pool, ThreadPoolExecutor(count) as threads, bar:
        work = partial(_costs, path=path, found=found, rules=rules, pool=pool, tokenizer=tokenizer, limit=max_seq_len)
        for batch in _batches(path):
            for line, costs in threads.map(work, batch):
                _add(out, line, costs, max_seq_len)
                bar.add()
    return out


def _batches(path: str) -> Iterator[list[tuple[int, Any]]]:
    batch: list[tuple[int, Any]] = []
    for one in rows(path):
        batch.append(one)
        if len(batch) == _AHEAD:
            yield batch
            batch = []
    if batch:
        yield batch


def _costs(
    one: tuple[int, Any],
    path: str,
    found: Detected,
    rules: VisionRules,
    pool: MediaPool,
    tokenizer: Tokenizer | None,
    limit: int,
) -> tuple[int, _Costs | RowProblem]:
    line, raw = one
    folder = Path(path).absolute().parent
    row: VisionRow | RowProblem = parsed(
        raw,
        line,
        path,
        lambda value: (
            read_vision_pair(value, folder, found.format)
            if found.preference
            else read_vision_row(value, folder, found.format, False)
        ),
    )
    if isinstance(row, RowProblem):
        return line, row
    read_header = headers_from(pool, rules.limits)
    known: dict[tuple[int, int], MediaHeader] = {}

    def header_of(given: GivenMedium, index: int) -> MediaHeader:
        key = id(given), index
        if key not in known:
            known[key] = read_header(given, index)
        return known[key]

    try:
        media = [one.medium for one in seen(row.media, rules, header_of)]
        made, whole = _tokens(row, tokenizer, rules, limit, header_of) if tokenizer else (None, 0)
    except (MediaError, BadRow) as error:
        return line, RowProblem(path, line, error.kind, error.reason)
    return line, _Costs(
        line,
        row,
        sum(tokens_of(medium, rules) for medium in media),
        sum(int(np.prod(medium.grid)) for medium in media),
        sum(medium.video for medium in media),
        {share: _tokens_at(row, rules, share, header_of) for share in _STEPS},
        whole,
        isinstance(made, Dropped) and made.kind == "overlong",
        bool(made is not None and not isinstance(made, Dropped) and made.dropped_turns),
    )


def _tokens(
    row: VisionRow, tokenizer: Tokenizer, rules: VisionRules, limit: int, header_of: HeaderOf
) -> tuple[Assembled | Dropped, int]:
    """What training makes of the row, and the tokens of all of it, whatever would be cut."""
    if not isinstance(row, VisionPair):
        assembler = VisionAssembler(tokenizer, rules)
        return assembler.sample(row, limit, "drop", header_of), assembler.length(row, header_of)
    pair = VisionPairAssembler(tokenizer, rules, "all", PairRules(max_prompt_len=sys.maxsize))
    whole = pair.pair(row, sys.maxsize, header_of)
    size = len(whole.sample.ids) if isinstance(whole, Assembled) else 0
    return pair.pair(row, limit, header_of), size


def _tokens_at(row: VisionRow, rules: VisionRules, share: float, header_of: Any) -> int:
    """-1: some medium cannot be sized so."""
    most, of_videos = (max(1, int(share * n)) for n in (rules.max_pixels, rules.video_max_pixels))
    other = replace(
        rules,
        max_pixels=most,
        video_max_pixels=of_videos,
        min_pixels=min(rules.min_pixels, most // 4),
        video_min_pixels=min(rules.video_min_pixels, of_videos // 4),
    )
    try:
        return sum(tokens_of(one.medium, other) for one in seen(row.media, other, header_of))
    except MediaError:
        return -1


def _add(out: VisionBudget, line: int, found: _Costs | RowProblem, limit: int) -> None:
    out.rows += 1
    if isinstance(found, RowProblem):
        out.kinds[found.kind] += 1
        if len(out.bad) < _SHOWN:
            out.bad.append(found)
        return
    out.unused.update(found.row.unused)
    out.videos += found.videos
    out.pictures += len(found.row.media) - found.videos
    out.tokens.append(found.tokens)
    out.patches.append(found.patches)
    out.whole.append(found.whole)
    out.cut += found.cut
    for share, count in found.at.items():
        before = out.at.get(share, 0)
        out.at[share] = before + count if count >= 0 <= before else -1
    if found.dropped or found.tokens > limit:
        out.too_long.append((line, found.whole or found.tokens))


def budget_lines(path: str, budget: VisionBudget, rules: VisionRules, max_seq_len: int, with_text: bool) -> list[str]:
    bad = sum(budget.kinds.values())
    compared = f"{counted(len(budget.tokens), 'preference pair')}, " if budget.pairs else ""
    out = [
        f"  {counted(budget.rows, 'row')}, {compared}{counted(budget.pictures, 'picture')}, "
        f"{counted(budget.videos, 'video')}, {counted(bad, 'bad row')} "
        f"({bad / max(1, budget.rows):.2%})",
        "  headers were read and no pixel decoded: training decodes each medium, and may find more bad ones",
    ]
    if budget.tokens:
        out.append(f"  tokens of pictures a row: {_spread(budget.tokens)}; patches: {_spread(budget.patches)}")
        if with_text:
            out.append(f"  tokens of a row in all: {_spread(budget.whole)}")
        costs = ", ".join(
            f"{int(share * rules.max_pixels):,}: {short(count)}"
            for share, count in sorted(budget.at.items())
            if count >= 0
        )
        out.append(f"  what max_pixels costs, in tokens of all pictures: {costs} (now {rules.max_pixels:,})")
    if budget.too_long:
        long = len(budget.too_long)
        what = counted(long, "row has pictures that are", "rows have pictures that are")
        what = counted(long, "row is", "rows are") if with_text else what
        out.append(f"  {what} longer than max_seq_len={max_seq_len:,} and would be left out")
        out += [f"    {path}:{line}  {tokens:,} tokens" for line, tokens in budget.too_long[:_SHOWN]]
    if budget.cut:
        out.append(f"  {counted(budget.cut, 'row')} would lose the oldest turns to fit max_seq_len={max_seq_len:,}")
    if not with_text and budget.tokens:
        out.append("  text is not counted: --model FOLDER names a tokenizer")
    if budget.unused:
        out.append("  " + unused_line(budget.unused))
    return out


def _spread(numbers: list[int]) -> str:
    middle, high = (int(q) for q in np.percentile(numbers, [50, 95]))
    return f"median {middle:,}, p95 {high:,}, max {max(numbers):,}"
