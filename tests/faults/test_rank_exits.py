"""Two real ranks, killed or asked to leave: afterwards the run goes on to the very bits of one nobody disturbed.

rank_runs.py starts them, rank_faults.py harms; the sizes of every commit, and with the mark `full` the larger ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from erniekit.checkpoint.manager import CheckpointManager
from faults.rank_runs import (
    ASYNC,
    EVERY,
    FSDP,
    PHASES,
    PP,
    SEED,
    STEPS,
    TIMEOUT,
    TP,
    Ended,
    RankServer,
    Reference,
    judge,
    undisturbed,
)
from faults.results import Row, fault
from support.processes import wait_until_gone

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

LEAVE_S = 40.0  # for a rank whose peer died; seconds on a free machine, half an hour when nobody tells it


# --- K3: killed


def kill_plan(rng: random.Random, kind: str, step: int, reference: Reference) -> list[dict[str, Any]]:
    """`step` is even, so that it ends in a save."""
    if kind == "inside a save":  # of the calls until it is published, and then of a deletion
        return [dict(rank=0, step=step, at="file", do="kill", call=rng.randint(2, reference.calls + 3 * (step > 4)))]
    if kind == "while its part is asked for":
        return [dict(rank=1, step=step, at="answer", do="kill", call=rng.randint(1, 6))]
    if kind == "with its part written":
        return [dict(rank=1, step=step, at="part", do="kill")]
    victims = (0, 1) if kind == "both" else (rng.randrange(2),)
    at, when = rng.choice([*PHASES, "save"]), step
    if at != "save":
        when -= rng.randrange(2)
    return [dict(rank=rank, step=when, at=at, do="kill") for rank in victims]


def killed_and_restarted(
    row: Row, server: RankServer, reference: Reference, name: str, kinds: list[str], rng: random.Random, **keys: Any
) -> float:
    """One run, killed once for each of `kinds` and started again each time; returns how long a survivor stayed."""
    starts: list[Ended] = []
    slowest = 0.0
    steps = sorted(rng.sample(range(4, STEPS + 1, EVERY), len(kinds)))
    for kind, step in zip(kinds, steps):
        plan = kill_plan(rng, kind, step, reference)
        victims = [f["rank"] for f in plan]
        ended = server.run(name, faults=plan, **keys)
        starts.append(ended)
        story = f"FAULT_SEED={SEED} {kind} {plan}\n{ended.story()}"
        row.count += 1
        assert len(ended.faults()) == len(victims), story
        assert all(ended.codes[rank] == -signal.SIGKILL for rank in victims), story
        row.hits += 1
        for rank in {0, 1} - set(victims):
            stayed = ended.ended[rank] - max(ended.ended[v] for v in victims)
            assert ended.codes[rank] not in (0, 75), f"as if all were well: {story}"
            assert stayed < LEAVE_S, story
            slowest = max(slowest, stayed)
        judge(row, reference, server.folder / name, starts, finished=False)
    starts.append(server.run(name, **keys))
    judge(row, reference, server.folder / name, starts, finished=True)
    return slowest


def test_a_run_whose_ranks_are_killed_goes_on_bit_for_bit(server: RankServer, dp: Reference, tp: Reference) -> None:
    rng = random.Random(SEED)
    with fault("K3", "kill -9 of one rank, of both, inside a save; data and tensor parallel, plain and async") as row:
        slowest = killed_and_restarted(row, server, dp, "k3-dp", ["one", "inside a save"], rng)
        kinds = ["while its part is asked for", "with its part written", "both"]
        slowest = max(slowest, killed_and_restarted(row, server, tp, "k3-tp", kinds, rng, **TP, **ASYNC))
        row.note = f"the other rank left within {slowest:.1f} s"
    assert row.hits == row.count == 5


@pytest.mark.full
def test_twenty_kills_under_five_layouts_change_no_bit(server: RankServer, dp: Reference, tp: Reference) -> None:
    rng, slowest = random.Random(SEED), 0.0
    runs = {
        "dp": (dp, ASYNC, ["one", "inside a save", "both", "inside a save"]),
        "tp": (tp, TP, ["while its part is asked for", "one", "both", "inside a save"]),
        "tp-async": (tp, {**TP, **ASYNC}, ["inside a save", "while its part is asked for", "one", "both"]),
        "pp": (undisturbed(server, "pp", **PP), PP, ["one", "both", "while its part is asked for", "inside a save"]),
        "fsdp": (undisturbed(server, "fsdp", **FSDP), FSDP, ["one", "inside a save", "one", "both"]),
    }
    with fault("K3", "the same, 20 kills under data, tensor, pipeline parallel and sharding") as row:
        for name, (reference, keys, kinds) in runs.items():
            took = killed_and_restarted(row, server, reference, f"k3-20-{name}", kinds, rng, **keys)
            slowest = max(slowest, took)
        row.note = f"the other rank left within {slowest:.1f} s"
    assert row.hits == row.count == 20


@pytest.mark.full
def test_the_launcher_starts_killed_ranks_again_and_they_resume(server: RankServer, dp: Reference) -> None:
    with fault("K3", "kill -9 of one rank under `erniekit train nproc_per_node=2`: restarted by itself") as row:
        words = dict(launcher=True, nproc_per_node=2, max_restarts=1)
        started = server.start("k3-launcher", ranks=1, **words)
        ranks = ranks_of_launcher(started.pids[0], server.folder / "k3-launcher" / "checkpoint-4")
        row.count = 1
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        wait_until_gone(ranks[0], seconds=LEAVE_S)
        row.note = f"the other rank left within {time.monotonic() - killed:.1f} s"
        ended = started.wait()
        row.hits = ended.said(0).count("error: rank 1 was ended by SIGKILL")
        judge(row, dp, server.folder / "k3-launcher", [ended], finished=True)
        assert row.hits == 1, ended.story()
        assert "restart 1 of 1" in ended.said(0)


@pytest.mark.full
def test_a_launcher_that_may_not_restart_says_which_checkpoint_the_same_command_resumes_from(
    server: RankServer,
) -> None:
    words = dict(launcher=True, nproc_per_node=2, max_restarts=0, max_steps=2000)
    with fault("K3", "kill -9 of one rank under `erniekit train nproc_per_node=2 max_restarts=0`") as row:
        started = server.start("k3-no-restart", ranks=1, **words)
        ranks = ranks_of_launcher(started.pids[0], server.folder / "k3-no-restart" / "checkpoint-4")
        row.count = 1
        os.kill(ranks[1], signal.SIGKILL)
        ended = started.wait()
        row.hits = ended.said(0).count("error: rank 1 was ended by SIGKILL")
        assert row.hits == 1, ended.story()
        whole = CheckpointManager(server.folder / "k3-no-restart").latest_good()
        assert whole is not None
        assert f"fix:   run the same command; it resumes from {whole.name}\n" in ended.said(0), ended.story()
        assert ended.codes == [128 + signal.SIGKILL], ended.story()
        assert "Traceback" not in ended.said(0)


@pytest.mark.full
def test_ranks_do_not_outlive_a_killed_launcher_and_the_next_one_resumes(server: RankServer, dp: Reference) -> None:
    with fault("K3", "kill -9 of the launcher") as row:
        words = dict(launcher=True, nproc_per_node=2)
        started = server.start("k3-orphans", ranks=1, **words)
        ranks = ranks_of_launcher(started.pids[0], server.folder / "k3-orphans" / "checkpoint-4")
        row.count = row.hits = 1
        os.kill(started.pids[0], signal.SIGKILL)
        began = time.monotonic()
        wait_until_gone(*ranks, seconds=LEAVE_S)  # without a launcher they hold the device and the folder
        row.note = f"its ranks left within {time.monotonic() - began:.1f} s"
        first = started.wait()
        again = server.start("k3-orphans", ranks=1, **words).wait()
        judge(row, dp, server.folder / "k3-orphans", [first, again], finished=True)


def ranks_of_launcher(launcher: int, checkpoint: Path) -> list[int]:
    """Their process ids in the order of ranks, once they have saved `checkpoint`."""
    until = time.monotonic() + TIMEOUT
    while not checkpoint.is_dir():
        assert time.monotonic() < until, f"{checkpoint.name} did not come"
        time.sleep(0.005)
    found = {int(child.environ()["RANK"]): child.pid for child in psutil.Process(launcher).children()}
    return [found[rank] for rank in sorted(found)]


# --- T1, T2: asked to leave


def asked_to_leave(
    row: Row, server: RankServer, reference: Reference, name: str, rank: int, step: int, at: str
) -> Ended:
    """SIGTERM to one rank in this moment: both save this very step and end with 75."""
    folder = server.folder / name
    ended = server.run(name, faults=[dict(rank=rank, step=step, at=at, do="term")])
    story = f"FAULT_SEED={SEED} SIGTERM to rank {rank} at step {step}, {at}\n{ended.story()}"
    row.count, row.hits = row.count + 1, row.hits + len(ended.faults())
    assert len(ended.faults()) == 1, story
    assert ended.codes == [75, 75], story
    # A signal that comes once a step's ranks have agreed is for the next one; both must mean the same.
    last = [ended.steps(r)[-1] for r in (0, 1)]
    assert last[0] == last[1] == step, story
    assert ended.journal(0, "published")[-1]["step"] == step, story
    assert (folder / f"checkpoint-{step}").is_dir(), story
    story_json = json.loads((folder / "run.json").read_text())
    assert "of preempt_grace_s" not in story_json["events"][-1]["text"], f"it was not late: {story_json['events'][-1]}"
    return ended


def test_a_signal_to_one_rank_saves_on_both_and_a_second_one_leaves_at_once(server: RankServer, dp: Reference) -> None:
    rng, folder = random.Random(SEED), server.folder / "t2"
    with fault("T2", "SIGTERM to one rank of two; then twice to the writer, and to one that waits for it") as row:
        first = asked_to_leave(row, server, dp, "t2", rank=1, step=rng.randint(2, 4), at=rng.choice(PHASES))
        grace = max(first.ended) - first.faults()[0]["time"]
        assert grace < 25, "the usual 30 s of a scheduler"
        done = first.steps(0)[-1]
        twice = [dict(rank=0, step=6, at="update", do="term"), dict(rank=0, step=6, at="file", do="term", call=5)]
        second = server.run("t2", faults=twice)
        assert second.steps(0)[0] == done + 1, "no step is repeated"
        took = second.ended[0] - second.journal(0, "fault")[1]["time"]
        row.count, row.hits = row.count + 1, row.hits + len(second.faults()) - 1
        assert second.codes[0] == 128 + signal.SIGTERM, second.story()
        assert second.codes[1] not in (0, 75), "it knows of no checkpoint either"
        judge(row, dp, folder, [first, second], finished=False)
        third, waited = twice_to_the_one_that_waits(server, row)
        judge(row, dp, folder, [first, second, third], finished=False)
        last = server.run("t2")
        judge(row, dp, folder, [first, second, third, last], finished=True)
        assert max(took, waited) < LEAVE_S, "at once: a disk that hangs is not waited for"
        row.note = f"saved and left {grace:.1f} s after the signal; asked twice, within {max(took, waited):.1f} s"
    assert row.hits == row.count == 3


def twice_to_the_one_that_waits(server: RankServer, row: Row) -> tuple[Ended, float]:
    """Rank 0's disk hangs in the save; rank 1, asked first, waits for it in C++ and is asked again."""
    plan = [dict(rank=1, step=6, at="update", do="term"), dict(rank=0, step=6, at="file", do="hang", call=5)]
    started = server.start("t2", faults=plan)
    journal = started.logs / "journal-0.jsonl"
    until = time.monotonic() + TIMEOUT
    while not (journal.exists() and '"do": "hang"' in journal.read_text()):
        assert time.monotonic() < until, "rank 0 did not come to its save"
        time.sleep(0.01)
    time.sleep(0.2)  # rank 1 waits by now
    asked = time.monotonic()
    os.kill(started.pids[1], signal.SIGTERM)
    while 1 not in started.ends:
        assert server.listen(30), "rank 1 waits in C++ and does not hear the signal"
    while 0 not in started.ends:  # asked by its peer and not by a signal so far; two that come at once count as one
        assert time.monotonic() < asked + 60, "rank 0 sleeps in Python and hears signals"
        os.kill(started.pids[0], signal.SIGTERM)
        server.listen(0.2)
    ended = started.wait()
    row.count, row.hits = row.count + 1, row.hits + (len(ended.faults()) == 2)
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.story()
    return ended, ended.ended[1] - asked


def leaving_again_and_again(
    row: Row, server: RankServer, dp: Reference, name: str, rng: random.Random, stops: int
) -> None:
    starts: list[Ended] = []
    for step in sorted(rng.sample(range(1, STEPS), stops)):
        rank, at = rng.randrange(2), rng.choice(PHASES)
        starts.append(asked_to_leave(row, server, dp, name, rank, step, at))
        judge(row, dp, server.folder / name, starts, finished=False)
    starts.append(server.run(name))
    judge(row, dp, server.folder / name, starts, finished=True)
    for rank in (0, 1):
        assert [s for start in starts for s in start.steps(rank)] == list(range(1, STEPS + 1)), (
            "none twice, none left out"
        )
    longest = max(max(start.ended) - start.faults()[0]["time"] for start in starts[:-1])
    assert longest < 25
    row.note = f"saved and left within {longest:.1f} s"


def test_stopped_at_random_steps_a_run_continues_without_repeating_one(server: RankServer, dp: Reference) -> None:
    with fault("T1", "SIGTERM at random steps to a random rank of two") as row:
        leaving_again_and_again(row, server, dp, "t1", random.Random(SEED), stops=2)


@pytest.mark.full
def test_stopped_twenty_times_a_run_continues_without_repeating_a_step(server: RankServer, dp: Reference) -> None:
    with fault("T1", "SIGTERM at 20 random steps to a random rank of two") as row:
        for part in range(4):
            leaving_again_and_again(row, server, dp, f"t1-{part}", random.Random(SEED + part), stops=5)
    assert row.hits == row.count == 20
