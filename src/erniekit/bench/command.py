"""`erniekit bench`: a process for each workload and each whole command, one after the other, and one table at the end.

In the command table; imports no torch, which only the workers need.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from erniekit.bench import real, real_cases
from erniekit.bench.peers import NEEDS
from erniekit.bench.real_cases import RealCase
from erniekit.bench.report import differences, remarks, table
from erniekit.bench.workloads import BenchOptions, Workload, chosen
from erniekit.config.opening_line import announce_work
from erniekit.errors import ConfigError
from erniekit.files import OwnedFiles
from erniekit.flag_parser import FlagParser
from erniekit.log import emit, warn
from erniekit.registry import nearest

STEPS, WARMUP = 8, 3  # timed, and before those
BEGIN_WITHIN = 0.7
AHEAD = 8  # cores from which on the next process may import while this one measures
OF_WORKLOADS = ("--peers", "--warmup", "--seed", "--profile", "--calibrate")  # not of whole commands
OF_COMMANDS = ("--layers", "--again")


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
    work, cases = _chosen(flags)
    _refuse_idle(flags, bool(work), bool(cases))
    if flags.list:
        for line in (*map(_about_workload, work), *map(_about_case, cases)):
            emit(line)
        return 0
    options = _options(flags)
    out = Path(flags.output_dir).expanduser()
    if flags.calibrate:
        return _calibrate(out, flags.tiny)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cases = _as_measured(cases, flags, Path(folder), options.keys)
        names = [each.name for each in work] + [case.name for case in cases]
        announce_work(f"bench of {', '.join(names)}, to {out}")
        _warn_of_a_cpu(flags.tiny)
        _claim(out, work, cases)
        results, failed = run_all(work, options, out, flags.seconds_limit) if work else ([], [])
        until = math.inf if flags.seconds_limit is None else began + flags.seconds_limit
        timed, lost = real.run_real(cases, out, Path(folder), dict(options.keys), flags.again, flags.tiny, until)
    if work:
        _write(out, results, failed, timed)
    lines = real.table(timed) if not work else (*table(results, timed), *remarks(results), *real.remarks(timed))
    for line in lines if results or timed else ():
        emit(line)
    emit(f"written to {' and '.join(str(out / name) for name in _files(work, cases))}")
    wrong = any(not run["parity"]["equal"] for r in results for run in r["runs"] if run.get("parity"))
    return 1 if failed or wrong or lost else 0


def _chosen(flags: argparse.Namespace) -> tuple[list[Workload], list[RealCase]]:
    """By name; all of both where none is given, whole commands alone with --real."""
    names = _items(flags.only)
    if flags.real or flags.calibrate:
        return [], real_cases.chosen(names) if flags.real else []
    of_cases = [name for name in names if name in real_cases.CASES]
    others = [name for name in names if name not in of_cases]
    work = chosen(others) if others or not names else []
    return work, real_cases.chosen(of_cases) if of_cases or not names else []


def _refuse_idle(flags: argparse.Namespace, work: bool, cases: bool) -> None:
    """Flags that the rest of the command gives no meaning to."""
    what = "with --real, which times whole commands" if flags.real else "where whole commands alone are timed"
    without = "without --real" if not flags.calibrate else "with --calibrate"
    for group, used, why, fix in (
        (OF_WORKLOADS, work or not cases, what, "leave out --real" if flags.real else "name a workload: --only A1"),
        (OF_COMMANDS, cases, without, "add --real, or name a whole command: --only sft"),
    ):
        for flag in () if used else group:
            given = getattr(flags, flag[2:].replace("-", "_"))
            if given is not None and given is not False:  # 0 is given
                raise ConfigError(f"{flag} does nothing {why}", where="erniekit bench", fix=f"leave it out, or {fix}")


def _warn_of_a_cpu(tiny: bool) -> None:
    from erniekit.devices import pick

    if not tiny and pick("auto").handle.type == "cpu":
        warn("no accelerator here: a CPU may take hours for one of these; --tiny runs toy sizes, each in seconds")


def _about_workload(work: Workload) -> str:
    return f"{work.name:<10} {work.about}; peers: {', '.join(work.possible) or '-'}"


def _about_case(case: RealCase) -> str:
    aim = f"{case.aim:,.0f} real tokens/s on one H200" if case.aim else "-"
    return f"{case.name:<10} {case.about}; aim: {aim}"


def _as_measured(
    cases: Sequence[RealCase], flags: argparse.Namespace, folder: Path, keys: Mapping[str, str]
) -> list[RealCase]:
    """As the flags have them, their keys checked before anything is measured."""
    out = [real_cases.cut(case, flags.layers or 0) for case in cases]
    out = [real_cases.tiny(case) for case in out] if flags.tiny else out
    out = [replace(case, steps=flags.steps) for case in out] if flags.steps is not None else out
    real.check_keys(out, folder, keys)
    return out


def _claim(out: Path, work: Sequence[Workload], cases: Sequence[RealCase]) -> None:
    """The files that are replaced."""
    of_work = [name for each in work for name in (f"{each.name}.json", f"{each.name}.profile.txt")]
    OwnedFiles(out).claim(*_files(work, cases), *of_work, *map(real.log_name, cases))


def _files(work: Sequence[Workload], cases: Sequence[RealCase]) -> list[str]:
    return ["bench.json"] * bool(work) + ["real.json"] * bool(cases)


def _write(
    out: Path, results: Sequence[dict[str, Any]], failed: Sequence[str], commands: Sequence[dict[str, Any]] = ()
) -> None:
    whole = {"results": results, "failed": failed, "commands": commands}
    (out / "bench.json").write_text(json.dumps(whole, indent=1))


def _calibrate(out: Path, tiny: bool) -> int:
    announce_work(f"rates of this device, to {out}")
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
            if left is not None and left < real.LEAST:
                names = [each.name for later in groups[number:] for each in later]
                emit(f"time limit: {', '.join(names)} not begun")
                failed += names
                break
            worker = waiting or Worker()
            waiting = Worker() if ahead and number + 1 < len(groups) else None
            worker.run(group, options, out, left, (len(results) + len(failed), len(work)))
            for each in group:
                result = _read(out, each)
                if result is None:
                    failed.append(each.name)
                    emit(f"{each.name}: no result")
                else:
                    results.append(result)
                    _show(result, out)
            _write(out, results, failed)
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
        # A session of its own: a Ctrl-C in the terminal is for us, who end it; it would show where its imports were.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "erniekit.bench.worker"],
            stdin=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            start_new_session=True,
        )

    def run(
        self,
        work: Sequence[Workload],
        options: BenchOptions,
        out: Path,
        seconds: float | None,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """The result is in out/NAME.json; when `seconds` are over, what is measured by then. place: how many were
        measured before, and of how many."""
        orders = []
        for number, each in enumerate(work, place[0] + 1):
            file = out / f"{each.name}.json"
            file.unlink(missing_ok=True)
            # The last part of the time is for what has begun already.
            values = {**asdict(options), "seconds": None if seconds is None else BEGIN_WITHIN * seconds}
            shown = f"{number} of {place[1]}" if place[1] > 1 else ""
            orders.append(
                json.dumps({"workload": each.name, "options": values, "file": str(file), "place": shown}) + "\n"
            )
        try:
            self._process.communicate("".join(orders), timeout=seconds)
        except subprocess.TimeoutExpired:
            emit("stopped by the time limit")
        finally:
            self.end()

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
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
