"""How long `erniekit plan` takes as a command. Bounds are of processor time and generous: others share the cores."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.clock import within

RECIPE = Path(__file__).resolve().parents[2] / "examples/configs/ERNIE-4.5-300B-A47B/sft/run_sft_8k.yaml"


@pytest.mark.full
@pytest.mark.parametrize(("cluster", "most"), [(["128x80G"], 8.0), (["2016xH200-141G", "--packs", "32256"], 40.0)])
def test_a_large_cluster_is_planned_in_seconds_and_the_first_line_comes_at_once(
    cluster: list[str], most: float
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    words = [sys.executable, "-m", "erniekit", "plan", str(RECIPE), "--cluster", *cluster]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        first, at = running.stdout.readline(), time.monotonic() - began
        until_first = sum(psutil.Process(running.pid).cpu_times()[:2])
        rest = running.stdout.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{cluster[0]}: first line after {at:.1f} s ({until_first:.2f} s of processor time), all after "
        f"{time.monotonic() - began:.1f} s ({spent:.1f} s)"
    )
    assert running.returncode == 0
    assert first.startswith("plan ")
    assert "smallest" in rest
    assert within(until_first, 1.0)
    assert within(spent, most)
