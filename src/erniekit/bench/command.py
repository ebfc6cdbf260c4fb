"""`erniekit bench`: a process for each workload, one after the other, and one table at the end.

In the command table; imports no torch, which only the workers need.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from erniekit.bench.peers import NEEDS
from erniekit.bench.report import differences, remarks, table
from erniekit.bench.workloads import WORKLOADS, BenchOptions, Workload, chosen
from erniekit.errors import ConfigError
from erniekit.files import OwnedFiles
from erniekit.flag_parser import FlagParser
from erniekit.log import emit
from erniekit.registry import nearest

STEPS, WARMUP = 8, 3  # timed, and before those
BEGIN_WITHIN = 0.7
LEAST = 20.0  # seconds: a workload is not begun with less
AHEAD = 8  # cores from which on the next process may import while this one measures
OF_WORKLOADS = ("--peers", "--warmup", "--seconds-limit", "--seed", "--profile", "--calibrate")  # not of --real
OF_REAL = ("--layers", "--again")


def bench_command(args: list[str]) -> int:
    flags = _parser().parse_args(args)
    with _stopped_as_by_ctrl_c():
        return _run(flags)


@contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """By SIGTERM and by a closed terminal, too: Python would leave at once, and the processes that measure would stay.
    One that is ignored (nohup) stays so."""
    watched = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in watched:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in watched:
            signal.signal(number, signal.SIG_DFL)


def _run(flags: argparse.Namespace) -> int:
    _refuse_idle(flags)
    if flags.list:
        if flags.real:
            return _list_real(flags.only)
        for work in WORKLOADS.values():
            emit(f"{work.name:<10} {work.about}; peers: {', '.join(work.possible) or '-'}")
        return 0
    out = Path(flags.output_dir).expanduser()
    if flags.calibrate:
        return _calibrate(out, flags.tiny)
    if flags.real:
        return _real(flags, out)
    work_list, options = chosen(_items(flags.only)), _options(flags)
    results_of = [name for work in work_list for name in (f"{work.name}.json", f"{work.name}.profile.txt")]
    OwnedFiles(out).claim("bench.json", *results_of)
    results, failed = run_all(work_list, options, out, flags.seconds_limit)
    for line in (*table(results), *remarks(results)) if results else ():
        emit(line)
    emit(f"written to {out / 'bench.json'}")
    wrong = any(not run["parity"]["equal"] for r in results for run in r["runs"] if run.get("parity"))
    return 1 if failed or wrong else 0


def _refuse_idle(flags: argparse.Namespace) -> None:
    """Flags that the rest of the command gives no meaning to."""
    for flag in OF_WORKLOADS if flags.real else OF_REAL:
        given = getattr(flags, flag[2:].replace("-", "_"))
        if given is not None and given is not False:  # 0 is given
            what = "with --real, which times whole commands" if flags.real else "without --real"
            raise ConfigError(
                f"{flag} does nothing {what}",
                where="erniekit bench",
                fix="leave it out, or leave out --real" if flags.real else "leave it out, or add --real",
            )


def _list_real(only: str) -> int:
    from erniekit.bench import real_cases

    for case in real_cases.chosen(_items(only)):
        aim = f"{case.aim:,.0f} real tokens/s on one H200" if case.aim else "-"
        emit(f"{case.name:<10} {case.about}; aim: {aim}")
    return 0


def _real(flags: argparse.Namespace, out: Path) -> int:
    from erniekit.bench import real, real_cases

    more = _options(flags).keys
    cases = [real_cases.cut(case, flags.layers or 0) for case in real_cases.chosen(_items(flags.only))]
    cases = [real_cases.tiny(case) for case in cases] if flags.tiny else cases
    if flags.steps is not None:
        cases = [replace(case, steps=flags.steps) for case in cases]
    with tempfile.TemporaryDirectory() as work:
        real.check_keys(cases, Path(work), more)
        OwnedFiles(out).claim("real.json", *map(real.log_name, cases))
        results, failed = real.run_real(cases, out, Path(work), dict(more), flags.again, flags.tiny)
    for line in real.table(results):
        emit(line)
    emit(f"written to {out / 'real.json'}")
    return 1 if failed else 0


def _calibrate(out: Path, tiny: bool) -> int:
    from erniekit.bench.calibrate import FILE, calibrated, lines

    OwnedFiles(out).claim(FILE)
    found = calibrated(tiny)
    (out / FILE).write_text(json.dumps(found, indent=1))
    for line in lines(found):
        emit(line)
    emit(f"written to {out / FILE}; `erniekit plan RECIPE --cluster ... --calibration {out / FILE}` reads it")
    return 0


def run_all(
    work: Sequence[Workload], options: BenchOptions, out: Path, seconds: float | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Results in order, and the names of workloads that gave none; both are in bench.json after every workload."""
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    failed: list[str] = []
    # Each in a process of its own; tiny ones share one, whose start is what takes the time there.
    groups = [list(work)] if options.tiny else [[each] for each in work]
    waiting: Worker | None = None
    ahead = (os.cpu_count() or 1) >= AHEAD
    try:
        for number, group in enumerate(groups):
            left = None if seconds is None else seconds - (time.monotonic() - began)
            if left is not None and left < LEAST:
                names = [each.name for later in groups[number:] for each in later]
                emit(f"time limit: {', '.join(names)} not begun")
                failed += names
                break
            worker = waiting or Worker()
            waiting = Worker() if ahead and number + 1 < len(groups) else None
            worker.run(group, options, out, left)
            for each in group:
                result = _read(out, each)
                if result is None:
                    failed.append(each.name)
                    emit(f"{each.name}: no result")
                else:
                    results.append(result)
                    _show(result, out)
            (out / "bench.json").write_text(json.dumps({"results": results, "failed": failed}, indent=1))
    finally:
        if waiting is not None:
            waiting.end()
    return results, failed


def _read(out: Path, work: Workload) -> dict[str, Any] | None:
    file = out / f"{work.name}.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def _show(result: dict[str, Any], out: Path) -> None:
    if not result["tiny"]:  # those are done in no time, and the table follows
        for line in (*table([result])[2:], *differences(result)):
            emit(f"  {line}")
    if result["profile"]:
        from erniekit.bench.profile import lines

        profile = lines(result["workload"], result["profile"])
        (out / f"{result['workload']}.profile.txt").write_text("\n".join(profile) + "\n")
        for line in profile:
            emit(f"  {line}")


class Worker:
    """A process that has imported what it needs and waits for its workload."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "erniekit.bench.worker"], stdin=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def run(self, work: Sequence[Workload], options: BenchOptions, out: Path, seconds: float | None) -> None:
        """The result is in out/NAME.json; when `seconds` are over, what is measured by then."""
        orders = []
        for each in work:
            file = out / f"{each.name}.json"
            file.unlink(missing_ok=True)
            # The last part of the time is for what has begun already.
            values = {**asdict(options), "seconds": None if seconds is None else BEGIN_WITHIN * seconds}
            orders.append(json.dumps({"workload": each.name, "options": values, "file": str(file)}) + "\n")
        try:
            self._process.communicate("".join(orders), timeout=seconds)
        except subprocess.TimeoutExpired:
            emit("stopped by the time limit")
        finally:
            self.end()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _options(flags: argparse.Namespace) -> BenchOptions:
    peers = None if flags.peers is None else tuple(p for p in _items(flags.peers) if p != "none")
    for name in peers or ():
        if name not in NEEDS:
            near = nearest(name, list(NEEDS))
            raise ConfigError(
                f"no peer {name!r}",
                where="--peers",
                fix=f"did you mean {near[0]}?" if near else "choose from: none, " + ", ".join(NEEDS),
            )
    keys = {}
    for setting in flags.keys:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} is not key=value", where="erniekit bench", fix="write attention=varlen")
        keys[key] = value
    for number, flag in ((flags.steps, "--steps"), (flags.warmup, "--warmup"), (flags.layers, "--layers")):
        if number is not None and number < 1:
            raise ConfigError(f"{flag} is {number}", where="erniekit bench", fix="use 1 or more")
    return BenchOptions(
        peers, flags.steps or STEPS, flags.warmup or WARMUP, flags.tiny, flags.profile, keys, flags.seed or 0
    )


def _items(text: str) -> list[str]:
    return [item for item in text.replace(" ", ",").split(",") if item]


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="erniekit bench", add_help=False)
    parser.add_argument("keys", nargs="*", metavar="key=value")
    parser.add_argument("--only", default="")
    parser.add_argument("--peers", default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--warmup", type=int, default=None)
    parser.add_argument("--seconds-limit", "--seconds_limit", type=float, default=None)
    parser.add_argument("--output_dir", "--output-dir", default="bench")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--again", action="store_true")
    return parser
