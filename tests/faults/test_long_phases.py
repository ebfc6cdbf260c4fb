"""Two real ranks whose evaluation or save takes longer than the hang limit: healthy work goes on, a standstill ends.
And a signal in the middle of an evaluation is obeyed between two batches."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from faults.rank_runs import ASYNC, TP, Ended, RankServer, Reference, Started, curve, judge
from faults.results import fault

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

# Ten times as long in an evaluation, in a save and in the first steps: all that two steps consist of.
HARD = 0.4
LIMIT = 10 * HARD
SHORT = dict(max_steps=2, save_steps=2, hang_soft_s=-1, hang_hard_s=HARD)


def evaluating(server: RankServer, every: int) -> dict[str, Any]:
    rows = server.folder / "rows.jsonl"
    return dict(eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=every, per_device_eval_batch_size=1)


def evaluations(folder: Path) -> list[int]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r["global_step"] for r in records if "eval_loss" in r]


def test_an_evaluation_longer_than_the_hang_limit_is_left_alone(server: RankServer) -> None:
    slow = [dict(rank=0, step=2, until=2, at="batch", do="wait", call=0, seconds=0.7)]
    with fault("H3", "an evaluation longer than the hang limit, each batch far shorter") as row:
        ended = server.run("eval-slow", faults=slow, **SHORT, **evaluating(server, 2), packing=False)
        batches = ended.journal(0, "batch")
        row.count, row.hits = 1, int(batches[-1]["time"] - batches[0]["time"] > LIMIT)
        assert row.hits == 1, "it did take longer than the limit"
        assert ended.codes == [0, 0], ended.story()
        assert evaluations(server.folder / "eval-slow") == [2]
        row.note = f"limit {LIMIT:.0f} s: left alone"


def test_an_evaluation_that_stands_still_still_ends_for_a_restart(server: RankServer) -> None:
    stuck = [dict(rank=1, step=2, at="batch", do="hang", call=3)]
    with fault("H1", "one rank of two hangs in the third batch of an evaluation") as row:
        ended = server.run("eval-stuck", faults=stuck, **SHORT, **evaluating(server, 2), packing=False)
        row.count, row.hits = 1, len(ended.faults())
        assert row.hits == 1, ended.story()
        assert 70 in ended.codes, ended.story()
        assert set(ended.codes) <= {70, 1}, "whoever ends first breaks the other's connection"
        took = max(ended.ended) - ended.faults()[0]["time"]
        assert LIMIT - 2 < took < LIMIT + 20, ended.story()  # 0.4 s without the stretch; for ever without a watchdog
        assert (server.folder / "eval-stuck" / "checkpoint-2").is_dir(), "saved before it was evaluated"
        row.note = f"limit {LIMIT:.0f} s: ended after {took:.1f} s, the step's checkpoint written before"


@pytest.mark.parametrize(
    "behind", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in front", "in the background"]
)
@pytest.mark.full
def test_a_save_longer_than_the_hang_limit_is_left_alone_on_the_ranks_that_wait_too(
    server: RankServer, behind: bool
) -> None:
    name = f"save-slow-{behind}"
    slow = [dict(rank=0, step=2, until=2, at="file", do="wait", call=0, seconds=0.3)]
    with fault("H3", "a save longer than the hang limit, each file far shorter") as row:
        ended = server.run(name, faults=slow, **SHORT, **TP, **(ASYNC if behind else {}))
        calls = [event["time"] for event in ended.faults()]
        row.count, row.hits = 1, int(calls[-1] - calls[0] > LIMIT)
        assert row.hits == 1, f"{len(calls)} calls in {calls[-1] - calls[0]:.1f} s"
        assert ended.codes == [0, 0], ended.story()
        row.note = f"limit {LIMIT:.0f} s: left alone, the rank that waits for the writer too"


@pytest.mark.full
def test_a_token_cache_whose_lock_is_never_let_go_ends_the_run_in_the_preparing_phase(server: RankServer) -> None:
    """Twenty times as long as a step: reading and tokenising have the longest silences."""
    keys = dict(SHORT, hang_hard_s=0.15, max_seq_len=95)  # tokens of its own
    healthy = dict(keys, hang_hard_s=-1)
    with fault("H1", "a token cache whose lock another process holds and does nothing") as row:
        assert server.run("lock-made", ranks=1, **healthy).codes == [0]
        made = max((server.folder / "cache" / "tokens").glob("*.lock"), key=lambda path: path.stat().st_mtime)
        shutil.rmtree(made.with_suffix(""))
        with made.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            ended = server.run("lock-held", ranks=1, **keys)
            asked = terminated_while_it_waits(server.start("lock-held", ranks=1, **healthy))
        row.count = row.hits = 1
        assert ended.codes == [70], ended.story()
        report = (server.folder / "lock-held" / "hangs" / "rank-0-step-1.txt").read_text()
        assert "phase prepare" in report
        assert "in only_one" in report
        assert asked.codes == [75], asked.story()
        assert f"waiting: {made} is held by" in asked.said(0)
        assert server.run("lock-held", ranks=1, **healthy).codes == [0], "once it is free"
        row.note = "limit 3 s: ended with 70, the lock in the stacks; a signal while it waits is obeyed at once"


def terminated_while_it_waits(run: Started) -> Ended:
    until, log = time.monotonic() + 60, run.logs / "rank-0.log"
    while not (log.exists() and "waiting" in log.read_text()):
        assert time.monotonic() < until, "it says whom it waits for"
        time.sleep(0.1)
    os.kill(run.pids[0], signal.SIGTERM)
    return run.wait(60)


@pytest.mark.parametrize(
    "every", [4, pytest.param(3, marks=pytest.mark.full)], ids=["a step that is saved", "a step that is not"]
)
def test_a_signal_in_an_evaluation_leaves_between_two_batches_and_the_run_goes_on_bit_for_bit(
    server: RankServer, dp: Reference, every: int
) -> None:
    name, keys = f"t3-{every}", evaluating(server, every)
    plan = [
        dict(rank=1, step=every, at="batch", do="term", call=2),
        dict(rank=0, step=every, until=every, at="batch", do="wait", call=0, seconds=0.3),
    ]
    with fault("T3", "SIGTERM to one rank of two in the second batch of an evaluation") as row:
        folder = server.folder / name
        first = server.run(name, faults=plan, **keys)
        asked = next(event for event in first.faults() if event["do"] == "term")
        row.count, row.hits = 1, 1
        assert first.codes == [75, 75], first.story()
        assert len(first.journal(1, "batch")) == 2, "not one more"
        assert (folder / f"checkpoint-{every}").is_dir()
        assert [e["step"] for e in first.journal(0, "published")].count(every) == 1, "saved once"
        assert evaluations(folder) == [], "half an evaluation is none"
        took = max(first.ended) - asked["time"]
        again = server.run(name, **keys)
        judge(row, dp, folder, [first, again], finished=True)
        assert curve(folder) == dp.curve
        assert evaluations(folder) == [*range(every, 10, every), 10], "made up for, once each"
        assert again.journal(0, "batch")[0]["step"] == every
        row.note = f"all ranks left {took:.1f} s after the signal; evaluated when resumed"
        assert took < 30, "the rest of the evaluation is not waited for"


def test_two_ranks_save_by_the_first_ones_clock_and_a_kill_costs_minutes_not_the_run(
    server: RankServer, dp: Reference
) -> None:
    """Every tenth of a second, with save_steps out of reach; rank 1 sleeps a while so that time passes."""
    keys = dict(save_minutes=0.1 / 60, save_steps=10_000_000)
    plan = [
        dict(rank=1, step=1, until=7, at="update", do="wait", seconds=0.06),
        dict(rank=1, step=8, at="update", do="kill"),
    ]
    with fault("K3", "kill -9 of one rank of two, saves by time alone") as row:
        folder = server.folder / "by-time"
        first = server.run("by-time", faults=plan, **keys)
        row.count, row.hits = 1, sum(event["do"] == "kill" for event in first.faults())
        assert row.hits == 1, first.story()
        saved = [event["step"] for event in first.journal(0, "published")]
        assert saved, first.story()
        again = server.run("by-time", **keys)
        judge(row, dp, folder, [first, again], finished=True)
        assert again.steps(0)[0] == max(saved) + 1
        row.note = "went on from the last one, bit for bit"


def test_tokens_are_counted_on_all_data_ranks(server: RankServer) -> None:
    one = server.run("tokens-one", ranks=1, gradient_accumulation_steps=2, max_steps=3)
    two = server.run("tokens-two", ranks=2, max_steps=3)
    assert (one.codes, two.codes) == ([0], [0, 0])
    counts = []
    for run in ("tokens-one", "tokens-two"):
        folder = server.folder / run
        state = json.loads((folder / "checkpoint-3" / "state.json").read_text())
        told = json.loads((folder / "train_results.json").read_text())
        records = [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
        rates = [round(r["tokens_per_second"] * r["interval_runtime"]) for r in records]
        assert told["train_tokens"] == state["tokens"] == sum(rates)
        counts.append((state["tokens"], state["trained_tokens"], rates))
    assert counts[0] == counts[1], "the same packs, whoever reads them"
