"""The result of reading one dataset file: counts, bad rows, lengths. Kept with the token cache, printed at start.

tokenise.py fills a DataReport, recipes print `lines()` and put `to_dict()` into the run's report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.data.types import UNREADABLE, RowProblem
from erniekit.errors import DataError
from erniekit.printable import counted, public

SHOWN = 20  # bad rows quoted in an error
SHOWN_ALIKE = 3  # of those with the same kind and reason
SHOWN_LINES = 5  # of repeated and near-empty rows
FAULT = "error"  # the kind of a bad row that our own code failed on
SHOWN_FIELDS = 12  # named in the line on fields that are not used
_BARS = " ▁▂▃▄▅▆▇█"


class BadRowsFile(NamedTuple):
    """Where the bad rows of a run are listed, for a rank that may only name it: one writes it for all."""

    path: Path
    is_written: bool = True


@dataclass
class DataReport:
    file: str
    format: str
    rows: int = 0
    samples: int = 0
    bad: dict[str, int] = field(default_factory=dict)  # kind -> rows that could not be read
    first_bad: list[RowProblem] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # kind -> conversations a rule left out
    first_dropped: list[RowProblem] = field(default_factory=list)
    dropped_turns: int = 0  # older turns left out of samples that were kept
    rewritten_turns: int = 0  # older answers that are read only: the chat template renders them otherwise than when new
    truncated_tokens: int = 0
    unused: dict[str, int] = field(default_factory=dict)  # field -> rows in which it holds something no reader takes
    encoding: str = ""  # and how it was found; empty for UTF-8
    content: str = ""  # a digest of the file, empty where it is not read whole; repeat.py compares it
    duplicates: int = 0  # rows with the same content as an earlier one
    first_duplicates: list[tuple[int, int]] = field(default_factory=list)  # (line, line of the first)
    near_empty: int = 0  # rows with a nearly empty answer
    first_near_empty: list[int] = field(default_factory=list)  # their lines
    thinking: str = "all"  # the rule for thoughts
    thoughts: int = 0  # answers with reasoning, in rows that gave samples
    thoughts_in: int = 0  # of them, those whose thought is in its sample
    thought_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # min, median, p95, max
    histogram: list[tuple[int, int]] = field(default_factory=list)  # (longest in the bin, samples), powers of two
    # preference data only: prompt, chosen, rejected -> median, p95, max tokens; and pairs whose chosen answer is longer
    pair_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    chosen_longer: int = 0
    desirable: int | None = None  # rows of one judged answer only: how many are to be learnt
    # rows with pictures only
    pictures: int = 0
    videos: int = 0
    vision_tokens: int = 0  # of pictures, frames and the marks around them
    patches: int = 0
    seconds: float = 0.0  # of tokenising, when it was done
    from_cache: bool = False
    so_far: bool = False  # the source was still being read

    def __post_init__(self) -> None:
        self.file = public(self.file)

    @property
    def bad_rows(self) -> int:
        return sum(self.bad.values())

    @property
    def bad_fraction(self) -> float:
        return self.bad_rows / self.rows if self.rows else 0.0

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def measure(self, lengths: np.ndarray) -> None:
        """Fills in what follows from the samples' lengths."""
        self.samples, self.tokens = len(lengths), int(lengths.sum(dtype=np.int64))
        if not len(lengths):
            return
        middle, high = (int(q) for q in np.percentile(lengths, [50, 95]))
        self.lengths = {"min": int(lengths.min()), "median": middle, "p95": high, "max": int(lengths.max())}
        bins = np.bincount(np.ceil(np.log2(lengths)).astype(int))
        first = int(np.flatnonzero(bins)[0])
        self.histogram = [(2**power, int(bins[power])) for power in range(first, len(bins))]

    def measure_pairs(self, lengths: np.ndarray, parts: np.ndarray) -> None:
        """`parts` as in preference.py. A prompt is all that its answers do not have for themselves."""
        if not len(lengths):
            return
        chosen, rejected = parts["rejected"] - parts["shared"], lengths - parts["rejected"]
        prompt = parts["shared"] + (parts["scored"] == parts["rejected"])  # its last token is in both parts
        for name, tokens in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
            middle, high = (int(q) for q in np.percentile(tokens, [50, 95]))
            self.pair_lengths[name] = {"median": middle, "p95": high, "max": int(tokens.max())}
        self.chosen_longer = int((chosen > rejected).sum())

    def measure_verdicts(self, lengths: np.ndarray, parts: np.ndarray) -> None:
        """Of answers that are judged one by one."""
        for name, tokens in (("prompt", parts["shared"]), ("answer", lengths - parts["shared"])):
            if len(tokens):
                middle, high = (int(q) for q in np.percentile(tokens, [50, 95]))
                self.pair_lengths[name] = {"median": middle, "p95": high, "max": int(tokens.max())}
        self.desirable = int((parts["score_delta"] > 0).sum())

    def breaks_off(self, max_bad_fraction: float) -> bool:
        """Whether a file could not be read to its end. The rows behind are of no known number: one bad row, and no
        share of them; only where every bad row is taken it is none too many."""
        return UNREADABLE in self.bad and max_bad_fraction < 1

    def is_too_bad(self, max_bad_fraction: float) -> bool:
        return self.bad_fraction > max_bad_fraction or self.breaks_off(max_bad_fraction)

    def check(self, max_bad_fraction: float, bad_rows_path: Path) -> None:
        """Stops a run whose data is not what its owner expects."""
        if self.breaks_off(max_bad_fraction):
            cut = [f"{p.file}:{p.line}  {p.reason}" for p in self.first_bad if p.kind == UNREADABLE]
            raise DataError(
                f"{self.file} cannot be read to its end; "
                f"{counted(self.rows - self.bad[UNREADABLE], 'row')} before were",
                where="\n       ".join(cut) or f"kind `{UNREADABLE}` in {bad_rows_path}",
                fix="get or write the file again, whole (max_bad_fraction: 1 uses what can be read of it)",
            )
        if self.bad_fraction > max_bad_fraction:
            shown = [f"{p.file}:{p.line}  {p.kind}: {p.reason}" for p in _different(self.first_bad[:SHOWN])]
            more = self.bad_rows - len(shown)
            raise DataError(
                f"{self.bad_rows:,} of {counted(self.rows, 'row')} of {self.file} cannot be used "
                f"({self.bad_fraction:.2%}, more than max_bad_fraction={max_bad_fraction:g})",
                where="\n       ".join([*shown, f"and {more:,} more"] if more > 0 else shown),
                fix=f"fix them (all are listed in {bad_rows_path}), or raise max_bad_fraction"
                + (f"; rows of kind `{FAULT}` show a bug in erniekit, please report it" if FAULT in self.bad else ""),
            )
        if not self.samples:
            reasons = [f"{n:,} {kind}" for kind, n in [*self.bad.items(), *self.dropped.items()]]
            first = [f"{p.file}:{p.line}  {p.kind}: {p.reason}" for p in [*self.first_bad, *self.first_dropped][:5]]
            raise DataError(
                f"{self.file} gives no usable sample "
                f"({counted(self.rows, 'row')}: {', '.join(reasons) or 'the file is empty'})",
                where="\n       ".join(first) or self.file,
                fix="look at a row, its format and max_seq_len; `erniekit data FILE` shows what was read"
                if self.rows
                else "write rows into it, or leave it out",
            )

    def lines(self) -> list[str]:
        what, learnt = ("pair", "scored") if self.pair_lengths else ("sample", "trained")
        if self.desirable is not None:
            what = "answer"
        out = [
            f"{self.file} ({self.format}): {counted(self.rows, 'row')}, {counted(self.samples, what)}, "
            f"{short(self.tokens)} tokens, {self.trained_share:.0%} {learnt}"
            + (" (cached)" if self.from_cache else " (so far)" if self.so_far else "")
        ]
        if self.lengths:
            text = ", ".join(f"{name} {n:,}" for name, n in self.lengths.items())
            top = max(n for _, n in self.histogram)
            bars = "".join(_BARS[-(-8 * n // top)] for _, n in self.histogram)
            one = "an answer" if what == "answer" else f"a {what}"
            out.append(f"  tokens {one}: {text}  {bars} (to {self.histogram[-1][0]:,})")
        if self.pictures or self.videos:
            share = self.vision_tokens / self.tokens if self.tokens else 0
            out.append(
                f"  seen: {counted(self.pictures, 'picture')}, {counted(self.videos, 'video')}, "
                f"{short(self.patches)} patches, {short(self.vision_tokens)} tokens ({share:.0%} of all)"
            )
        if self.pair_lengths:
            median = ", ".join(f"{name} {text['median']:,}" for name, text in self.pair_lengths.items())
            most = ", ".join(f"{text['max']:,}" for text in self.pair_lengths.values())
            text = f"chosen is longer in {self.chosen_longer / self.samples:.0%} of the pairs"
            if self.desirable is not None:
                text = verdicts(self.desirable, self.samples - self.desirable)
            out.append(f"  of it, median: {median} (at most {most}); {text}")
        if self.bad:
            out.append(f"  bad rows: {_counts(self.bad)} ({self.bad_fraction:.3%})")
            out += [f"    {Path(p.file).name}:{p.line}  {p.reason}" for p in self.first_bad[:3]]
        if self.dropped:
            out.append(f"  dropped: {_counts(self.dropped)}")
            out += [f"    {Path(p.file).name}:{p.line}  {p.reason}" for p in self.first_dropped[:2]]
        if self.dropped_turns or self.truncated_tokens:
            turns, tokens = counted(self.dropped_turns, "older turn"), counted(self.truncated_tokens, "token")
            out.append(f"  to fit: {turns} and {tokens} left out")
        if self.rewritten_turns:
            text = "are read and not trained: the chat template rewrites them once they are history"
            out.append(f"  earlier answers: {self.rewritten_turns:,} {text}")
        if self.thoughts:
            out.append("  " + self._thoughts())
        if self.unused:
            out.append("  " + unused_line(self.unused))
        return out + [f"  {line}" for line in quality_lines(self)]

    def _thoughts(self) -> str:
        what = "read, not trained" if self.thinking == "mask" else "trained with their answers"
        left = self.thoughts - self.thoughts_in
        why = "train_thinking" if self.thinking in ("last", "drop") else "the chat template"
        out = f"thoughts: {self.thoughts_in:,} of {counted(self.thoughts, 'answer that thinks', 'answers that think')}"
        out += f", {short(self.thought_tokens)} tokens, {what}" if self.thoughts_in else ""
        return out + (f"; {left:,} left out by {why} or with older turns" if left else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"trained_share": round(self.trained_share, 4)}

    @classmethod
    def from_dict(cls, values: dict[str, Any], file: str) -> DataReport:
        """As stored; `file` is where the same bytes lie now."""
        values = {key: values[key] for key in cls.__dataclass_fields__ if key in values} | {"file": file}
        for key in ("first_bad", "first_dropped"):
            values[key] = [RowProblem(**(problem | {"file": file})) for problem in values[key]]
        values["first_duplicates"] = [(line, first) for line, first in values.get("first_duplicates", ())]
        values["histogram"] = [(top, n) for top, n in values["histogram"]]
        return cls(**values)


def _different(problems: Sequence[RowProblem]) -> list[RowProblem]:
    """Without the fourth of a kind and reason, and later ones: they say nothing new."""
    seen: Counter[tuple[str, str]] = Counter()
    out = []
    for problem in problems:
        seen[problem.kind, problem.reason] += 1
        if seen[problem.kind, problem.reason] <= SHOWN_ALIKE:
            out.append(problem)
    return out


def quality_lines(report: DataReport) -> list[str]:
    """What is readable, and may still not be meant."""
    out = [f"encoding: {report.encoding}"] if report.encoding else []
    if report.duplicates:
        shown = ", ".join(f"{line} = {first}" for line, first in report.first_duplicates)
        more = ", ..." if report.duplicates > len(report.first_duplicates) else ""
        rows = "row repeats" if report.duplicates == 1 else "rows repeat"
        places = f" (row {shown}{more})" if shown else ""  # of several files in one report rows have no number
        out.append(f"duplicates: {report.duplicates:,} {rows} an earlier one{places}")
    if report.near_empty:
        shown = ", ".join(map(str, report.first_near_empty))
        more = ", ..." if report.near_empty > len(report.first_near_empty) else ""
        out.append(f"near-empty answers: {counted(report.near_empty, 'row')} (row {shown}{more})")
    return out


def verdicts(desirable: int, others: int) -> str:
    return f"{counted(desirable, 'answer is', 'answers are')} desirable, {counted(others, 'is', 'are')} not"


def unused_line(fields: Mapping[str, int]) -> str:
    """Fields of rows that hold something and are not understood, most frequent first."""
    named = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
    text = [f"`{name}` in {counted(count, 'row')}" for name, count in named[:SHOWN_FIELDS]]
    more = len(named) - SHOWN_FIELDS
    return "fields not used: " + ", ".join([*text, f"and {counted(more, 'more field')}"] if more > 0 else text)


def total_lines(reports: Sequence[DataReport]) -> list[str]:
    """One line over several sources; nothing to add for one."""
    if len(reports) < 2:
        return []
    tokens, trained = sum(r.tokens for r in reports), sum(r.trained_tokens for r in reports)
    return [
        f"together: {sum(r.samples for r in reports):,} samples, {short(tokens)} tokens, "
        f"{trained / max(tokens, 1):.0%} trained"
    ]


def short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _counts(kinds: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items(), key=lambda i: -i[1]))
