"""Speed of two versions of erniekit on one machine, workload by workload, their turns alternating.

    git worktree add /tmp/before v0.1.0
    python benchmarks/versions.py /tmp/before/src --only A1,E1

Machines of one kind differ by some 2 %, and so does one from hour to hour: figures of two days do not compare. Of each
version the best turn counts; a workload that is slower by more than --allowed makes the exit code 1. With --profile,
each version's last turn is profiled after it is timed, and the differences are printed by kind of kernel and by kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src"
MOST_KERNELS = 16  # by how much they differ


def main() -> int:
    flags = parser().parse_args()
    if not (flags.before / "erniekit" / "__init__.py").is_file():
        print(f"{flags.before} holds no erniekit: give the src folder of the other version", file=sys.stderr)
        return 2
    slower = []
    for name in flags.only.split(","):
        best: dict[Path, dict[str, Any]] = {}
        profiles: list[dict[str, Any]] = []
        for number in range(flags.turns):
            for source in (flags.before, HERE):
                turn, profile = measured(source, name, flags, profile=flags.profile and number == flags.turns - 1)
                profiles += [profile] if profile else []
                if source not in best or turn["tokens_per_s"] > best[source]["tokens_per_s"]:
                    best[source] = turn
        before, now = best[flags.before], best[HERE]
        ratio = now["tokens_per_s"] / before["tokens_per_s"]
        print(f"{name:<10} {shown(before)} before, {shown(now)} now: {ratio:.3f} times", flush=True)
        if len(profiles) == 2:
            print(*differences(*profiles), sep="\n", flush=True)
        if ratio < 1 - flags.allowed:
            slower.append(name)
    if slower:
        print(f"slower by more than {flags.allowed:.0%}: {', '.join(slower)}")
    return 1 if slower else 0


def measured(
    source: Path, name: str, flags: argparse.Namespace, profile: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Our run of a workload, by the version at `source`, and where its time went."""
    with tempfile.TemporaryDirectory() as out:
        words = ["--only", name, "--peers", "none", "--steps", str(flags.steps), "--output_dir", out]
        words += [*(["--tiny"] if flags.tiny else []), *(["--profile"] if profile else [])]
        command = [sys.executable, "-m", "erniekit", "bench", *words]
        ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{name} of {source} failed:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(Path(out, f"{name}.json").read_text())
        return result["runs"][0], result["profile"]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Milliseconds of a step, by kind of kernel and of the kernels that differ most among the longest of each."""
    out = [f"  {'ms of a step':<40} {'before':>9} {'now':>9} {'more':>8}"]
    out.append(_difference("all kernels", before["busy_ms"], now["busy_ms"]))
    for kind in dict.fromkeys([*before["kinds_ms"], *now["kinds_ms"]]):
        out.append(_difference(kind, before["kinds_ms"].get(kind, 0.0), now["kinds_ms"].get(kind, 0.0)))
    first, second = ({one["kernel"]: one["ms"] for one in run["longest"]} for run in (before, now))
    names = sorted({*first, *second}, key=lambda name: -abs(second.get(name, 0.0) - first.get(name, 0.0)))
    out.append("  the kernels that differ most (-: not among the longest)")
    for name in names[:MOST_KERNELS]:
        both = (f"{times[name]:9.2f}" if name in times else f"{'-':>9}" for times in (first, second))
        out.append(f"  {' '.join(both)}  {name}")
    return out


def _difference(what: str, before: float, now: float) -> str:
    return f"  {what:<40} {before:9.2f} {now:9.2f} {now - before:+8.2f}"


def shown(run: dict[str, Any]) -> str:
    peak = f" in {run['peak_gib']:.1f} GiB" if run.get("peak_gib") else ""
    return f"{run['tokens_per_s']:,.0f} tokens/s{peak}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("before", type=Path, help="the src folder of the other version")
    made.add_argument("--only", default="A1,C1-85,E1", help="workloads of `erniekit bench --list`")
    made.add_argument("--turns", type=int, default=2, help="of each version")
    made.add_argument("--steps", type=int, default=8, help="timed in a turn")
    made.add_argument("--allowed", type=float, default=0.01, help="share of speed that may be lost")
    made.add_argument("--profile", action="store_true", help="show in which kernels the two differ")
    made.add_argument("--tiny", action="store_true", help="sizes for a CPU: whether it runs, not how fast")
    return made


if __name__ == "__main__":
    sys.exit(main())
