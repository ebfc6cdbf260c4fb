"""Two real ranks that live on with a failing disk, wrong numbers, a hang or a slow peer: both act alike, and nothing
saved is lost. rank_runs.py starts them, rank_faults.py harms."""

from __future__ import annotations

import errno
import random
import re
from typing import Any

import pytest

from faults.rank_runs import ASYNC, EVERY, SEED, STEPS, TP, Ended, RankServer, Reference, judge
from faults.results import Row, fault

pytestmark = pytest.mark.xdist_group("faults")  # in turn: they share a server, and their limits are in seconds

TRIES = 3  # of a measure of time: a machine that stands still while a rank computes makes that one the slow one


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
        missed = [line for line in ended.said(0).splitlines() if "CHECKPOINT NOT SAVED" in line]
        assert sum("No space left on device" in line for line in missed) == 2


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
    with fault("N2", "one bit of a weight changed on one rank of three; of two; found by a save") as row:
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
        saves = server.run("n2-saves", 2, [dict(rank=1, step=3, at="weights", do="flip")], drift_check_steps=1000)
        assert saves.codes == [3, 3], saves.story()
        assert "step 4: replicas no longer hold the same weights" in saves.said(0), "no schedule: the save asks"
        assert [e["step"] for e in saves.journal(0, "published")] == [2]
        row.count, row.hits = 3, len(three.faults()) + len(two.faults()) + len(saves.faults())
        assert row.hits == 3
        judge(row, dp, server.folder / "n2-two", [two], finished=False)
        again = server.run("n2-two", drift_check_steps=3)
        judge(row, dp, server.folder / "n2-two", [two, again], finished=True)
        row.note = "found at the next check, the rank named, exit code 3"


# --- H1, H2: hung and slow


def test_a_rank_that_never_joins_is_ended_with_stacks_of_both_and_the_run_resumes(
    server: RankServer, dp: Reference
) -> None:
    soft, hard = 0.5, 3.0  # far apart: the other rank is to write its stacks before the first one ends
    with fault("H1", "one rank of two never enters the step's collective") as row:
        folder = server.folder / "h1"
        plan = [dict(rank=1, step=6, at="collective", do="hang")]
        hung = server.run("h1", faults=plan, hang_soft_s=soft, hang_hard_s=hard)
        row.count, row.hits = 1, len(hung.faults())
        assert row.hits == 1, hung.story()
        # Whoever ends first breaks the other's connection, which then ends by that error.
        assert 70 in hung.codes, hung.story()
        assert set(hung.codes) <= {70, 1, -9}, hung.story()  # -9: by the monitor, of a process that stood still
        took = max(hung.ended) - hung.faults()[0]["time"]
        assert hard - 0.5 < took < hard + 20, hung.story()  # for ever without a watchdog
        stacks = [(folder / "hangs" / f"rank-{rank}-step-6.txt").read_text() for rank in (0, 1)]
        assert "in all_reduce" in stacks[0]
        assert "in never_joins" in stacks[1]
        judge(row, dp, folder, [hung], finished=False)
        again = server.run("h1")
        judge(row, dp, folder, [hung, again], finished=True)
        row.note = f"hard time-out {hard:.0f} s: both gone after {took:.1f} s, stacks of both written"


def test_a_rank_five_times_slower_is_named_and_nobody_is_harmed(server: RankServer, dp: Reference) -> None:
    with fault("H2", "one rank of two five times slower") as row:
        for attempt in range(TRIES):
            name = f"h2-{attempt}"
            slow = server.run(name, faults=[dict(rank=1, step=1, until=STEPS, at="compute", do="slow")])
            row.count, row.hits = 1, int({event["on"] for event in slow.faults()} == set(range(1, STEPS + 1)))
            assert row.hits == 1, "slow in every step"
            judge(row, dp, server.folder / name, [slow], finished=True)
            named = set(re.findall(r"rank \d is slow \(\w+\)", slow.said(0)))
            if named == {"rank 1 is slow (compute)"}:
                break
        assert named == {"rank 1 is slow (compute)"}, slow.story()
        row.note = "reported with its number; the run ends as ever"
