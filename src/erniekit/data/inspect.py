"""`erniekit data FILE...`: which format each file has, how many rows, and every bad row by file and line.

Called by the command table; reads only, and needs neither a model nor torch.
"""

from __future__ import annotations

import argparse
from collections import Counter

from erniekit.data.formats import FORMATS, PREFERENCE, detect, parse, rows
from erniekit.data.types import Problem
from erniekit.errors import DataError
from erniekit.log import paint, say

_SHOWN = 20  # bad rows printed per file


def data_command(args: list[str]) -> int:
    """Exit code 0 when every row of every file is usable, 1 when some are not."""
    parser = argparse.ArgumentParser(prog="erniekit data", description="Check dataset files.")
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .json, .gz of either, .parquet")
    parser.add_argument("--type", choices=list(FORMATS), help="read as this format instead of detecting it")
    given = parser.parse_args(args)
    return max([_check(path, given.type) for path in given.files])


def _check(path: str, format: str | None) -> int:
    if format is None:
        found = detect(path)
        if found.format == PREFERENCE:
            say(f"{path}: {found.why}")
            return 0
        format, why = found.format, found.why
    else:
        why = "as given"
    total = examples = 0
    kinds: Counter[str] = Counter()
    shown: list[Problem] = []
    for line, raw in rows(path):
        total += 1
        result = parse(raw, line, path, format)
        if isinstance(result, Problem):
            kinds[result.kind] += 1
            if len(shown) < _SHOWN:
                shown.append(result)
        else:
            examples += len(result)
    if not total:
        raise DataError("dataset holds no rows", where=path)
    bad = sum(kinds.values())
    say(f"{path}: {paint(format, 'bold')} ({why})")
    say(f"  {total:,} rows, {examples:,} conversations, {bad:,} bad rows ({bad / total:.2%})")
    for problem in shown:
        say(f"  {paint(f'{problem.file}:{problem.line}', 'yellow')}: {problem.reason} [{problem.kind}]")
    if bad > len(shown):
        say(f"  ... and {bad - len(shown):,} more: " + ", ".join(f"{k} {n:,}" for k, n in kinds.most_common()))
    return 1 if bad else 0
