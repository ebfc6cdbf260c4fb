"""Measures again, on one card, what the docs claim and no CPU can show: as much of it as fits in the time at hand.

    python benchmarks/card_checks.py --list
    python benchmarks/card_checks.py --minutes 9 --only save,adapters --before /tmp/before/src

Checks run one after the other, in the order of --only. One that would end after the time is left out and named; one
that takes twice as long as it should is stopped with all its processes, and the next one begins. Output of each is in
OUT/NAME.log; what each printed last comes at the end, beside what must hold: tests and versions.py decide by their exit
code, of servers and whole commands the figures are to be read. Exit code 1 where a check failed, was stopped or was
left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DEVICE = "-m pytest -m cuda -q --durations=0 -p no:cacheprovider"
_TESTS = "tests/device/test_cuda_{0}.py"
GOOD = "exit code 0"
TAIL = 20  # lines of a check's output that the table repeats


@dataclass(frozen=True)
class CardCheck:
    name: str
    seconds: int  # on one H200
    words: str  # after `python`
    holds: str  # what must be so


def _files(*names: str) -> str:
    return " ".join(_TESTS.format(name) for name in names)


_ALL = (
    CardCheck(
        "versions", 240, "benchmarks/versions.py {before} --only A1,E1 --profile",
        "no workload is slower than before by 1 %",
    ),
    CardCheck(
        "versions-experts", 220, "benchmarks/versions.py {before} --only C1-85 --turns 2 --steps 6 --profile",
        "the same of 21B",
    ),
    CardCheck(
        "save", 40, "-m pytest -m full -q -s tests/distributed/test_rank_files.py -k two_gib",
        "2 GiB of four ranks in at most 1.2 times a plain write of the largest rank's",
    ),
    CardCheck(
        "adapters", 60, "benchmarks/serve_speed.py --model 0.3b --adapters 8 --clients 64 --tokens 256",
        "8 adapters at once give at least 70 % of one's tokens/s",
    ),
    CardCheck(
        "server", 120, "benchmarks/serve_speed.py --model 0.3b", "0.3B: 800 tokens/s for one client, 20,000 for 64"
    ),
    CardCheck(
        "server-experts", 240, "benchmarks/serve_speed.py --model 21b --tokens 256",
        "21B-A3B: 200 tokens/s for one client, 4,000 for 64; a first token under load in 3 times that alone",
    ),
    CardCheck("server-tests", 120, f"{_DEVICE} {_files('server', 'engine')}", "greedy tokens are the definition's"),
    CardCheck(
        "kernel-tests", 340, f"{_DEVICE} {_files('fp8', 'packed', 'vision', 'products', 'graph')}",
        "every kernel is within its tolerance of the plain one",
    ),
    CardCheck(
        "device-tests", 420,
        f"{_DEVICE} {_files('mixed', 'moe', 'optim', 'lean_optim', 'lora', 'experts', 'head', 'attention', 'steps')} "
        f"{_files('qat', 'saves', 'vendors', 'sft')}",
        "kernels, steps, saves and recipes on a card; DPO over experts starts at ln 2",
    ),
    CardCheck(
        "dpo-graph-tests", 60, f"{_DEVICE} {_files('graph')} -k pairs",
        "DPO whose layers are replayed has the losses of DPO whose layers are launched",
    ),
    CardCheck(
        "dpo-graphs", 150, "benchmarks/graphs.py --only pairs",
        "replayed is faster where launches show; its figures are to be read",
    ),
    CardCheck("rank-tests", 420, f"{_DEVICE} {_files('ranks')}", "one rank's losses, kernels and kernel time"),
    CardCheck(
        "commands", 270, "-m erniekit bench --real --only dpo-rows,lora-fp8 --layers 8 --again --output_dir {out}/real",
        "whole commands end without a failure; their figures are to be read",
    ),
)  # fmt: skip
CHECKS = {check.name: check for check in _ALL}


def main() -> int:
    flags = parser().parse_args()
    if flags.list:
        for check in CHECKS.values():
            print(f"{check.name:<17} {check.seconds:>4} s  {check.holds}\n{'':<25}python {check.words}")
        return 0
    chosen = flags.only.split(",") if flags.only else list(CHECKS)
    if unknown := [name for name in chosen if name not in CHECKS]:
        print(f"no check {unknown[0]!r}: choose from {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    if any("{before}" in CHECKS[name].words for name in chosen) and flags.before is None:
        print("versions are compared with another one: name its src folder by --before", file=sys.stderr)
        return 2
    flags.out = flags.out.resolve()
    flags.before = flags.before and flags.before.resolve()
    flags.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + flags.minutes * 60
    rows = [checked(CHECKS[name], flags, ends) for name in chosen]
    for check, (result, lines) in zip((CHECKS[name] for name in chosen), rows, strict=True):
        print(f"\n== {check.name}: {result} ({check.holds})", *lines, sep="\n   ", flush=True)
    return int(any(not result.startswith(GOOD) for result, _ in rows))


def checked(check: CardCheck, flags: argparse.Namespace, ends: float) -> tuple[str, list[str]]:
    """How it ended, and the end of what it printed."""
    left = ends - time.monotonic()
    if left < check.seconds:
        return f"left out: it takes {check.seconds} s, and {max(0.0, left):.0f} are left", []
    command = [sys.executable, *(word.format(before=flags.before, out=flags.out) for word in check.words.split())]
    log, began = flags.out / f"{check.name}.log", time.monotonic()
    source = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **source},
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(min(2 * check.seconds, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:  # Ctrl-C, too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - began
    result = "stopped" if code is None else f"exit code {code}"
    return f"{result} after {took:.0f} s", log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--list", action="store_true", help="the checks, what each takes and runs")
    made.add_argument("--only", default="", help="names, in order; all of them otherwise")
    made.add_argument("--minutes", type=float, default=60, help="for all of them")
    made.add_argument("--before", type=Path, help="the src folder of another version of erniekit")
    made.add_argument("--out", type=Path, default=Path("card-checks"), help="folder of their logs")
    return made


if __name__ == "__main__":
    sys.exit(main())
