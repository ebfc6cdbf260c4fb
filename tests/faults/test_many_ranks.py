"""Two real ranks and what can happen to them: killed, asked to leave, hung, slow, wrong, and a disk that fails.

Afterwards the run goes on to the very bits of one nobody disturbed. rank_runs.py starts them, rank_faults.py harms.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.rank_runs import Ended, RankServer, Reference, lost
from faults.results import Row, fault

# In turn: they share a server, and their limits are in seconds. Too long for every commit: `make test-full`.
pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.full]

SEED = int(os.environ.get("FAULT_SEED", time.time_ns() % 1_000_000))
STEPS, EVERY = 10, 2  # of a run; between its saves
LEAVE_S = 15.0  # for a rank whose peer died
PHASES = ("data", "forward/backward", "collective", "update")
TP = dict(tensor_parallel_degree=2, gradient_accumulation_steps=2)  # both ranks hold parts of what is saved
PP = dict(pipeline_parallel_degree=2, gradient_accumulation_steps=2)
FSDP = dict(sharding_parallel_degree=2, sharding="stage2")
ASYNC = dict(unified_checkpoint_config="async_save")


@pytest.fixture(scope="module")
def server(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    server = RankServer(tmp_path_factory.mktemp("ranks"), paddle)
    yield server
    server.close()


def undisturbed(server: RankServer, name: str, **keys: Any) -> Reference:
    ended = server.run(name, save_steps=1, save_total_limit=100, **keys)
    assert ended.codes == [0, 0], ended.story()
    return Reference(server.folder / name, ended)


@pytest.fixture(scope="module")
def dp(server: RankServer) -> Reference:
    return undisturbed(server, "dp")


@pytest.fixture(scope="module")
def tp(server: RankServer) -> Reference:
    return undisturbed(server, "tp", **TP)


def judge(row: Row, reference: Reference, folder: Path, starts: list[Ended], finished: bool) -> None:
    """Nothing lost, nothing torn; and once the run has finished, nothing different."""
    story = f"FAULT_SEED={SEED} {folder}\n{starts[-1].story()}"
    gone, torn = lost(folder, starts), reference.torn(folder)
    row.lost, row.torn = (row.lost or 0) + len(gone), (row.torn or 0) + len(torn)
    assert not gone, f"{gone} {story}"
    assert not torn, f"{torn} {story}"
    if finished:
        assert set(starts[-1].codes) == {0}, story
        different = reference.differing(folder)
        row.differing = (row.differing or 0) + len(different)
        assert not different, f"{different} {story}"


# --- K3: killed


def kill_plan(rng: random.Random, kind: str, step: int, reference: Reference) -> list[dict[str, Any]]:
    """`step` is even, so that it ends in a save."""
    if kind == "inside a save":  # of the calls until it is published, and then of a deletion
        return [dict(rank=0, step=step, at="file", do="kill", call=rng.randint(2, reference.calls + 3 * (step > 4)))]
    if kind == "while its part is asked for":
        return [dict(rank=1, step=step, at="answer", do="kill", call=rng.randint(1, 20))]
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
        kinds = ["while its part is asked for", "both"]
        slowest = max(slowest, killed_and_restarted(row, server, tp, "k3-tp", kinds, rng, **TP, **ASYNC))
        row.note = f"the other rank left within {slowest:.1f} s"
    assert row.hits == row.count == 4


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


def test_the_launcher_starts_killed_ranks_again_and_they_resume(server: RankServer, dp: Reference) -> None:
    with fault("K3", "kill -9 of one rank under `erniekit train nproc_per_node=2`: restarted by itself") as row:
        words = dict(launcher=True, nproc_per_node=2, max_restarts=1)
        started = server.start("k3-launcher", ranks=1, **words)
        ranks = ranks_of_launcher(started.pids[0], server.folder / "k3-launcher" / "checkpoint-4")
        row.count = 1
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        while psutil.pid_exists(ranks[0]) and psutil.Process(ranks[0]).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < killed + LEAVE_S
            time.sleep(0.01)
        row.note = f"the other rank left within {time.monotonic() - killed:.1f} s"
        ended = started.wait()
        row.hits = ended.said(0).count("error: rank 1 was ended by SIGKILL")
        judge(row, dp, server.folder / "k3-launcher", [ended], finished=True)
        assert row.hits == 1, ended.story()
        assert "restart 1 of 1" in ended.said(0)


@pytest.mark.full
def test_ranks_do_not_outlive_a_killed_launcher_and_the_next_one_resumes(server: RankServer, dp: Reference) -> None:
    with fault("K3", "kill -9 of the launcher") as row:
        words = dict(launcher=True, nproc_per_node=2)
        started = server.start("k3-orphans", ranks=1, **words)
        ranks = ranks_of_launcher(started.pids[0], server.folder / "k3-orphans" / "checkpoint-4")
        row.count = row.hits = 1
        os.kill(started.pids[0], signal.SIGKILL)
        began = time.monotonic()
        while any(psutil.pid_exists(pid) for pid in ranks):
            assert time.monotonic() < began + LEAVE_S, "ranks without a launcher hold the device and the folder"
            time.sleep(0.01)
        row.note = f"its ranks left within {time.monotonic() - began:.1f} s"
        first = started.wait()
        again = server.start("k3-orphans", ranks=1, **words).wait()
        judge(row, dp, server.folder / "k3-orphans", [first, again], finished=True)


def ranks_of_launcher(launcher: int, checkpoint: Path) -> list[int]:
    """Their process ids in the order of ranks, once they have saved `checkpoint`."""
    until = time.monotonic() + 60
    while not checkpoint.is_dir():
        assert time.monotonic() < until, f"{checkpoint.name} did not come"
        time.sleep(0.005)
    found = {int(child.environ()["RANK"]): child.pid for child in psutil.Process(launcher).children()}
    return [found[rank] for rank in sorted(found)]


# --- K4, D1, D2: saves that fail


def failed_saves(
    row: Row, server: RankServer, reference: Reference, name: str, faults: list[dict[str, Any]], **keys: Any
) -> Ended:
    """Both ranks count the same misses and go on; no other save is missed, and the run ends as if nothing had been."""
    ended = server.run(name, faults=[dict(rank=0, at="file", **f) for f in faults], **keys)
    story = ended.story()
    row.count, row.hits = row.count + len(faults), row.hits + len(ended.faults())
    assert len(ended.faults()) == len(faults), story
    missed = {f["step"] for f in faults}
    expected, misses = [], 0
    for step in range(EVERY, STEPS + 1, EVERY):
        misses = misses + 1 if step in missed else 0
        expected.append((step, misses))
    if STEPS in missed:
        expected.append((STEPS, 0))  # a run that ends leaves its last step on disk: it tries again, and waits for it
    for rank in (0, 1):
        assert [(e["step"], e["misses"]) for e in ended.journal(rank, "settled")] == expected, story
        assert ended.steps(rank) == list(range(1, STEPS + 1)), "training goes on"
    assert ended.said(0).count("CHECKPOINT NOT SAVED") == len(missed), story
    left = [path.name for path in (server.folder / name).iterdir() if path.name.startswith((".tmp-", ".old-", ".del-"))]
    assert left == [], story
    judge(row, reference, server.folder / name, [ended], finished=True)
    return ended


def test_a_background_writer_that_fails_costs_its_save_on_both_ranks_and_the_next_is_good(
    server: RankServer, dp: Reference
) -> None:
    rng = random.Random(SEED)
    with fault("K4", "the background writer of rank 0 fails inside a save; 2 ranks") as row:
        faults = [dict(step=s, do="fail", call=rng.randint(1, dp.calls), code=errno.EIO) for s in (2, 6, 10)]
        ended = failed_saves(row, server, dp, "k4", faults, **ASYNC)
        assert {event["thread"] for event in ended.faults()} == {"checkpoint-save"}, "beside the training"


@pytest.mark.full
def test_a_background_writer_may_fail_at_any_call_of_its_save(server: RankServer, tp: Reference) -> None:
    with fault("K4", "the background writer fails at each call of a save; tensor parallel") as row:
        for first in range(1, tp.calls, 3):
            calls = dict(zip((2, 4, 8), range(first, first + 3)))
            faults = [dict(step=s, do="fail", call=call, code=errno.EIO) for s, call in calls.items()]
            failed_saves(row, server, tp, f"k4-{first}", faults, **TP, **ASYNC)
    assert row.count >= 15


def test_a_full_or_failing_disk_is_the_same_miss_on_both_ranks(server: RankServer, dp: Reference) -> None:
    rng = random.Random(SEED)
    with fault("D1", "disk full on rank 0 while two ranks save") as row:
        faults = [
            dict(step=2, do="full", call=1),  # the kernel refuses the library's write
            dict(step=4, do="fail", call=rng.randint(1, dp.calls), code=errno.ENOSPC),
            dict(step=8, do="fail", call=rng.randint(1, dp.calls), code=errno.ENOSPC),
        ]
        ended = failed_saves(row, server, dp, "d1", faults)
        assert "File too large" in ended.said(0)
        assert ended.said(0).count("No space left on device") == 2


def test_three_failed_saves_in_a_row_stop_both_ranks_and_a_repaired_disk_lets_them_go_on(
    server: RankServer, dp: Reference
) -> None:
    with fault("D2", "I/O errors on rank 0 in three saves in a row; 2 ranks") as row:
        faults = [dict(rank=0, step=s, at="file", do="fail", call=9, code=errno.EIO) for s in (4, 6, 8)]
        stopped = server.run("d2", faults=faults)
        row.count, row.hits = len(faults), len(stopped.faults())
        assert row.hits == 3, stopped.story()
        assert stopped.codes == [2, 2], stopped.story()
        for rank in (0, 1):
            assert [e["misses"] for e in stopped.journal(rank, "settled")] == [0, 1, 2, 3]
            assert "Input/output error" in stopped.said(rank), "each says why it ends"
        judge(row, dp, server.folder / "d2", [stopped], finished=False)
        again = server.run("d2")
        assert again.steps(0)[0] == 3, "from checkpoint-2"
        judge(row, dp, server.folder / "d2", [stopped, again], finished=True)


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
        assert max(took, waited) < 2, "at once"
        row.note = f"saved and left {grace:.1f} s after the signal; asked twice, within {max(took, waited):.1f} s"
    assert row.hits == row.count == 3


def twice_to_the_one_that_waits(server: RankServer, row: Row) -> tuple[Ended, float]:
    """Rank 0's disk hangs in the save; rank 1, asked first, waits for it in C++ and is asked again."""
    plan = [dict(rank=1, step=6, at="update", do="term"), dict(rank=0, step=6, at="file", do="hang", call=5)]
    started = server.start("t2", faults=plan)
    journal = started.logs / "journal-0.jsonl"
    until = time.monotonic() + 30
    while not (journal.exists() and '"do": "hang"' in journal.read_text()):
        assert time.monotonic() < until, "rank 0 did not come to its save"
        time.sleep(0.01)
    time.sleep(0.2)  # rank 1 waits by now
    asked = time.monotonic()
    os.kill(started.pids[1], signal.SIGTERM)
    while 1 not in started.ends:
        assert server.listen(10), "rank 1 waits in C++ and does not hear the signal"
    while 0 not in started.ends:  # asked by its peer and not by a signal so far; two that come at once count as one
        assert time.monotonic() < asked + 10, "rank 0 sleeps in Python and hears signals"
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


# --- N1, N2: wrong numbers


def test_a_number_that_is_none_on_one_rank_is_skipped_on_both(server: RankServer) -> None:
    with fault("N1", "NaN in the loss, in a gradient and in a weight of one rank of two") as row:
        faults = [
            dict(rank=1, step=3, at="loss", do="nan"),
            dict(rank=0, step=5, at="gradient", do="nan"),
            dict(rank=0, step=7, at="weights", do="nan"),  # and stays: five bad steps, back to the checkpoint of step 6
        ]
        ended = server.run("n1", faults=faults, max_steps=14, drift_check_steps=0)
        story = ended.story()
        row.count, row.hits = len(faults), len(ended.faults())
        assert row.hits == 3, story
        assert ended.codes == [0, 0], story
        done = [
            [(e["step"], e["applied"], repr(e["loss"]), e["counters"]) for e in ended.journal(r, "step")]
            for r in (0, 1)
        ]
        assert done[0] == done[1], "every step, loss and counter the same on both"
        skipped = [step for step, applied, *_ in done[0] if not applied]
        assert skipped == [3, 5, 8, 9, 10, 11, 12], story
        ends = [ended.journal(rank, "end")[0] for rank in (0, 1)]
        assert ends[0]["weights"] == ends[1]["weights"], "replicas hold the same bits"
        assert ends[0]["finite"], story
        assert ends[1]["finite"], story
        _, _, skips, _, rollbacks, *_ = ends[0]["counters"]
        assert (skips, rollbacks) == (7, 1), story
        row.note = "7 updates skipped, gone back once, replicas equal"


def test_weights_that_are_not_numbers_are_never_saved(server: RankServer) -> None:
    with fault("N1", "a weight of one rank of two turns NaN: just before a save; just before the end") as row:
        # Before the save of step 8: refused, so that going back finds step 6 and the run recovers.
        plan = [dict(rank=0, step=8, at="weights", do="nan")]
        recovered = server.run("n1-save", faults=plan, max_steps=14, drift_check_steps=0)
        assert recovered.codes == [0, 0], recovered.story()
        for rank in (0, 1):
            saves = [(e["step"], e["misses"]) for e in recovered.journal(rank, "settled")]
            assert saves == [(2, 0), (4, 0), (6, 0), (8, 1), (8, 0), (10, 0), (12, 0), (14, 0)], recovered.story()
            assert recovered.journal(rank, "end")[0]["finite"], recovered.story()
        said = recovered.said(0)
        assert "NOT SAVED: checkpoint-8 was not written: embed.weight holds values that are not numbers" in said
        assert "going back to checkpoint-6" in said
        # In the last steps: no such model is published as the result, and the run does not end as if all were well.
        plan = [dict(rank=0, step=9, at="weights", do="nan")]
        ended = server.run("n1-end", faults=plan, drift_check_steps=0)
        assert ended.codes == [2, 2], ended.story()
        for rank in (0, 1):
            assert "checkpoint-10 was not written: embed.weight holds values" in ended.said(rank)
        assert [e["step"] for e in ended.journal(0, "published")] == [2, 4, 6, 8]
        assert not list((server.folder / "n1-end").glob("*.safetensors"))
        row.count, row.hits = 2, len(recovered.faults()) + len(ended.faults())
        assert row.hits == 2
        row.note = "not saved; gone back to sound ones; an end with an error, not with a NaN model"


def test_one_changed_bit_is_found_at_the_next_check_and_nothing_of_it_is_saved(
    server: RankServer, dp: Reference
) -> None:
    with fault("N2", "one bit of a weight changed on one rank of three; of two") as row:
        three = server.run("n2-three", 3, [dict(rank=2, step=3, at="weights", do="flip")], drift_check_steps=4)
        assert three.codes == [3, 3, 3], three.story()
        for rank in range(3):
            assert "step 4: replicas no longer hold the same weights: rank 2 differs from ranks 0, 1" in three.said(
                rank
            )
        assert [e["step"] for e in three.journal(0, "published")] == [2], "the check comes before the save"
        two = server.run("n2-two", 2, [dict(rank=1, step=5, at="weights", do="flip")], drift_check_steps=3)
        assert two.codes == [3, 3], two.story()
        assert "step 6: replicas no longer hold the same weights: ranks 0, 1 differ" in two.said(0)
        row.count, row.hits = 2, len(three.faults()) + len(two.faults())
        assert row.hits == 2
        judge(row, dp, server.folder / "n2-two", [two], finished=False)
        again = server.run("n2-two", drift_check_steps=3)
        judge(row, dp, server.folder / "n2-two", [two, again], finished=True)
        row.note = "found at the next check, the rank named, exit code 3"


# --- H1, H2: hung and slow


def test_a_rank_that_never_joins_is_ended_with_stacks_of_both_and_the_run_resumes(
    server: RankServer, dp: Reference
) -> None:
    soft, hard = 1.0, 3.0
    with fault("H1", "one rank of two never enters the step's collective") as row:
        folder = server.folder / "h1"
        plan = [dict(rank=1, step=6, at="collective", do="hang")]
        hung = server.run("h1", faults=plan, hang_soft_s=soft, hang_hard_s=hard)
        row.count, row.hits = 1, len(hung.faults())
        assert row.hits == 1, hung.story()
        # Whoever ends first breaks the other's connection, which then ends by that error.
        assert 70 in hung.codes, hung.story()
        assert set(hung.codes) <= {70, 1}, hung.story()
        took = max(hung.ended) - hung.faults()[0]["time"]
        assert hard - 0.5 < took < hard + 5, hung.story()
        stacks = [(folder / "hangs" / f"rank-{rank}-step-6.txt").read_text() for rank in (0, 1)]
        assert "in all_reduce" in stacks[0]
        assert "in never_joins" in stacks[1]
        judge(row, dp, folder, [hung], finished=False)
        again = server.run("h1", hang_soft_s=soft, hang_hard_s=hard)
        judge(row, dp, folder, [hung, again], finished=True)
        row.note = f"hard time-out {hard:.0f} s: both gone after {took:.1f} s, stacks of both written"


def test_a_rank_five_times_slower_is_named_and_nobody_is_harmed(server: RankServer, dp: Reference) -> None:
    with fault("H2", "one rank of two five times slower") as row:
        slow = server.run("h2", faults=[dict(rank=1, step=1, until=STEPS, at="compute", do="slow")])
        row.count, row.hits = 1, int({event["on"] for event in slow.faults()} == set(range(1, STEPS + 1)))
        assert row.hits == 1, "slow in every step"
        assert "rank 1 is slow (compute)" in slow.said(0), slow.story()
        assert "rank 0 is slow" not in slow.said(0)
        judge(row, dp, server.folder / "h2", [slow], finished=True)
        row.note = "reported with its number; the run ends as ever"
