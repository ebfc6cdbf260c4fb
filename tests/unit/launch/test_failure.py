"""A rank's last word: what it writes, what the launcher reads, and whose counts when several speak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli import main as cli
from erniekit.errors import DataError, Preempted, RankLost
from erniekit.launch.failure import CRASH, LAUNCHED, PREEMPTED, USER, Failure, first, read, record


@pytest.fixture
def word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in rank 1 of our launcher: where it leaves its word."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "word.json"))
    monkeypatch.setenv(LAUNCHED, "1")
    monkeypatch.setenv("RANK", "1")
    return tmp_path / "word.json"


def test_a_users_error_keeps_its_three_lines(word: Path, tmp_path: Path) -> None:
    assert record(DataError("no rows", where="a.jsonl", fix="add some"), 2)
    found = read(1, 2, word, tmp_path / "log")
    assert found.lines == ("error: no rows", "where: a.jsonl", "fix:   add some")
    assert (found.rank, found.kind, found.restartable, found.exit_code) == (1, USER, False, 2)


def test_a_crash_keeps_its_traceback_and_names_the_log(word: Path, tmp_path: Path) -> None:
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError as e:
        record(e, 1)
    found = read(1, 1, word, tmp_path / "workerlog.1")
    assert found.lines[0] == "error: ZeroDivisionError: oops"
    assert 'raise ZeroDivisionError("oops")' in "\n".join(found.lines)
    assert str(tmp_path / "workerlog.1") in found.lines[-1]
    assert found.restartable


def test_a_preempted_rank_is_not_started_again(word: Path, tmp_path: Path) -> None:
    record(Preempted("saved step 3"), 75)
    found = read(0, 75, word, tmp_path / "log")
    assert (found.kind, found.lines, found.restartable) == (PREEMPTED, ("saved step 3",), False)


def test_a_rank_killed_without_a_word_is_described_by_its_signal_and_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {k}" for k in range(100)))
    found = read(3, -9, tmp_path / "none.json", tmp_path / "log")
    assert "rank 3 was ended by SIGKILL" in found.lines[0]
    assert "line 99" in found.lines
    assert "line 50" not in found.lines
    assert (found.exit_code, found.restartable) == (137, True)


def test_the_file_is_one_torchrun_can_read_too(word: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    record(DataError("no rows"), 2)
    read_back = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(word))
    assert "no rows" in read_back.message["message"]
    assert read_back.timestamp > 1e9
    assert json.loads(word.read_text())["kind"] == USER


def test_the_cause_comes_before_those_that_only_miss_a_peer() -> None:
    def failure(rank: int, kind: str = CRASH, peer: bool = False, at: float = 1.0) -> Failure:
        return Failure(rank, 1, kind, (), peer=peer, at=at)

    assert first([failure(0, peer=True, at=1), failure(1, at=2)]).rank == 1
    assert first([failure(0, at=2), failure(1, at=1)]).rank == 1
    assert first([failure(0, at=1), failure(1, at=0.0)]).rank == 1, "killed: it had no time to say when"
    assert first([failure(0, at=0.0), failure(1, USER, at=9)]).rank == 1
    assert first([failure(1, PREEMPTED, at=1), failure(0, PREEMPTED, at=2)]).rank == 0


def test_losing_a_peer_is_told_from_a_fault_of_ones_own(word: Path, tmp_path: Path) -> None:
    import torch.distributed as dist

    for error, peer in (
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("NCCL"), False),
    ):
        record(error, 1)
        assert read(1, 1, word, tmp_path / "log").peer is peer, error


def test_a_rank_that_names_a_lost_peer_keeps_its_lines_and_all_are_started_again(word: Path, tmp_path: Path) -> None:
    record(RankLost("rank 0 ended", where="out: checkpoint-2", fix="resume"), RankLost.exit_code)
    found = read(1, 1, word, tmp_path / "log")
    assert found.lines[:3] == ("error: rank 0 ended", "where: out: checkpoint-2", "fix:   resume")
    assert (found.kind, found.peer, found.restartable, found.exit_code) == (CRASH, True, True, 1)
    killed = Failure(0, -9, CRASH, ("error: rank 0 was ended by SIGKILL",))
    assert first([found, killed]) is killed


def test_failures_travel_between_machines() -> None:
    failure = Failure(3, -9, CRASH, ("error: a", "where: b"), "host", True, 1.5)
    assert Failure.from_json(failure.to_json()) == failure


def test_the_command_leaves_its_word_to_the_launcher_and_says_nothing(word: Path, capsys, tmp_path: Path) -> None:
    assert cli.main(["train", "no_such.yaml"]) == 2
    assert capsys.readouterr().err == ""
    assert "no_such.yaml" in "\n".join(read(1, 2, word, tmp_path / "log").lines)


def test_under_torchrun_the_command_says_it_as_well(word: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED)
    assert cli.main(["train", "no_such.yaml"]) == 2
    assert "no_such.yaml" in capsys.readouterr().err
    assert word.exists()
