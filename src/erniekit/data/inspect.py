"""`erniekit data FILE...`: which format each file has, how many rows, what they compare, and bad rows by line.

Called by the command table; reads only, and needs neither a model nor torch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from erniekit.data.formats import FORMATS, Detected, Raw, detect, parse, parse_pair, rows
from erniekit.data.preference import Preference
from erniekit.data.report import unused_line
from erniekit.data.thinking import has_thought
from erniekit.data.types import ChatMessage, RowProblem
from erniekit.errors import ConfigError, DataError
from erniekit.log import paint, say
from erniekit.progress import WorkProgress

_SHOWN = 20  # bad rows printed per file


def data_command(args: list[str]) -> int:
    """Exit code 0 when every row of every file is usable, 1 when some are not."""
    given = data_parser().parse_args(args)
    for name, least in (("pixels", given.pixels), ("length", given.length)):
        if least is not None and least < 1:
            raise ConfigError(f"--{name} is {least}", where="erniekit data", fix=f"--{name} takes a number from 1 on")
    return max([_check(path, given) for path in given.files])


def data_parser() -> argparse.ArgumentParser:
    """cli/commands.py has the same in its table."""
    parser = argparse.ArgumentParser(prog="erniekit data", description="Check dataset files.", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .json, .gz of either, .parquet")
    parser.add_argument("--type", choices=FORMATS, help="read as this format instead of detecting it")
    parser.add_argument("--model", metavar="DIR", help="count the tokens of rows with pictures as this model does")
    parser.add_argument("--pixels", type=int, metavar="N", help="most pixels of a picture; the model's own")
    parser.add_argument("--length", type=int, default=8192, metavar="N", help="which rows would be cut; 8192")
    return parser


def _check(path: str, given: argparse.Namespace) -> int:
    found = detect(path, vision=True) if given.type is None else _as_given(path, given.type)
    if found.vision:
        return _check_vision(path, found, given)
    total = examples = 0
    kinds: Counter[str] = Counter()
    shown: list[RowProblem] = []
    unused: Counter[str] = Counter()
    thoughts = 0
    pairs = _Pairs()
    for line, raw in _counted(path):
        total += 1
        read = parse_pair if found.preference else parse
        result = read(raw, line, path, found.format)
        if isinstance(result, RowProblem):
            kinds[result.kind] += 1
            if len(shown) < _SHOWN:
                shown.append(result)
        elif isinstance(result, Preference):
            pairs.add(line, result)
            examples += 1
            unused.update(result.unused)
            thoughts += sum(map(has_thought, (*result.prompt, *result.chosen, *result.rejected)))
        else:
            examples += len(result)
            unused.update(result[0].unused)
            # of several conversations each is how the next begins
            thoughts += sum(map(has_thought, result[-1].messages))
    if not total:
        raise DataError("dataset holds no rows", where=path)
    bad = sum(kinds.values())
    what = "preference pairs" if found.preference else "conversations"
    say(f"{path}: {paint(found.format, 'bold')} ({found.why})")
    say(f"  {total:,} rows, {examples:,} {what}, {bad:,} bad rows ({bad / total:.2%})")
    if thoughts:
        say(f"  {thoughts:,} answers think first; `train_thinking` says what becomes of their thoughts")
    if unused:
        say(f"  {unused_line(unused)}")
    for line_of_text in pairs.lines():
        say(f"  {line_of_text}")
    _say_bad(shown, kinds)
    return 1 if bad else 0


def _check_vision(path: str, found: Detected, given: argparse.Namespace) -> int:
    from erniekit.data.vision.budget import budget_lines, measure, model_rules

    model = Path(given.model).expanduser() if given.model else None
    rules = model_rules(model, given.pixels)
    budget = measure(path, found, rules, given.length, model)
    say(f"{path}: {paint(found.format, 'bold')} ({found.why})")
    for line in budget_lines(path, budget, rules, given.length, model is not None):
        say(line)
    _say_bad(budget.bad, budget.kinds)
    return 1 if budget.kinds else 0


def _say_bad(shown: list[RowProblem], kinds: Counter[str]) -> None:
    for problem in shown:
        say(f"  {paint(f'{problem.file}:{problem.line}', 'yellow')}: {problem.reason} [{problem.kind}]")
    rest = kinds - Counter(problem.kind for problem in shown)
    if rest:
        more = ", ".join(f"{k} {n:,}" for k, n in rest.most_common())
        say(f"  ... and {rest.total():,} more: {more}")


def _counted(path: str) -> Iterator[tuple[int, Raw]]:
    with WorkProgress(f"checking {Path(path).name}", None, "rows") as progress:
        for row in rows(path):
            yield row
            progress.add()


def _as_given(path: str, format: str) -> Detected:
    try:
        found = detect(path, vision=True)
    except DataError:
        return Detected(format, "as given")
    return Detected(format, "as given", found.preference, found.vision)


class _Pairs:
    """What the pairs of a file are like, in characters: which model will read them is not known here."""

    def __init__(self) -> None:
        self.count = self.longer = self.alike = self.several = self.past = 0
        self.sizes: dict[str, Counter[int]] = {"prompt": Counter(), "chosen": Counter(), "rejected": Counter()}
        self.first: tuple[int, Preference] | None = None

    def add(self, line: int, pair: Preference) -> None:
        self.first = self.first or (line, pair)
        sizes = {"prompt": _size(pair.prompt), "chosen": _size(pair.chosen), "rejected": _size(pair.rejected)}
        for name, size in sizes.items():
            self.sizes[name][size] += 1
        self.count += 1
        self.longer += sizes["chosen"] > sizes["rejected"]
        self.alike += pair.chosen == pair.rejected
        self.several += len(pair.chosen) > 1 or len(pair.rejected) > 1
        self.past += any(message.role == "assistant" for message in pair.prompt)

    def lines(self) -> list[str]:
        if self.first is None:
            return []
        told = ", ".join(f"{name} {_median(sizes):,} (to {max(sizes):,})" for name, sizes in self.sizes.items())
        out = [f"characters, median: {told}; chosen is longer in {self.longer / self.count:.0%}"]
        if self.past:
            out.append(f"{self.past:,} prompts hold earlier turns; they are read, not scored")
        if self.several:
            out.append(f"{self.several:,} pairs have answers of several turns; the assistant's are scored")
        if self.alike:
            out.append(f"{self.alike:,} pairs have two equal answers; training leaves them out")
        line, pair = self.first
        out.append(f"row {line}; scored is what the assistant says in its last two lines:")
        out += [f"  {message.role:9} {_shown(message)}" for message in pair.prompt]
        for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            said = [paint(_shown(m), "bold") if m.role == "assistant" else f"({m.role}: {_shown(m)})" for m in answer]
            out.append(f"  {name:9} " + " ".join(said))
        return out


def _size(said: tuple[ChatMessage, ...]) -> int:
    return sum(len(message.content) for message in said)


def _median(counts: Counter[int]) -> int:
    seen = 0
    for size in sorted(counts):
        seen += counts[size]
        if 2 * seen >= counts.total():
            return size
    raise AssertionError("no counts")


def _shown(message: ChatMessage, most: int = 80) -> str:
    text = " ".join(message.content.split())
    return text if len(text) <= most else text[: most - 3] + "..."
