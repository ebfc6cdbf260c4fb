"""`erniekit rehearse --timeline` as it is typed: its line, its picture, its numbers, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from erniekit.cli.main import main
from erniekit.parallel import overlapped_reduce
from erniekit.parallel.engine import Engine
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.cluster import parse
from erniekit.recipes.rehearsed_timeline import ClusterRates, drawn, seconds, time_text
from erniekit.recipes.shrunken import SMALL
from erniekit.rehearse.moments import CountedWork
from erniekit.rehearse.timing import RankTimes

SHAPE = dict(
    SMALL, model_type="ernie4_5", num_hidden_layers=2, vocab_size=256, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    keys = dict(
        model_name_or_path=tmp_path,
        train_dataset_path="none.jsonl",
        max_seq_len=1024,
        compute_type="bf16",
        device="cpu",
    )
    return ["rehearse", *(f"{key}={value}" for key, value in keys.items())]


SHARDED = ("sharding=stage3", "sharding_parallel_degree=8")


def told(capsys, *words: str) -> dict:
    assert main([*words, "--timeline", "-", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["timeline"]


def test_gathers_of_shards_overlap_and_sums_of_tensor_parallel_ranks_do_not(words, capsys):
    sharded = told(capsys, *words, *SHARDED)
    assert sharded["hidden_seconds"] > 0
    cut = told(capsys, *words, "tensor_parallel_degree=2")
    assert cut["hidden_seconds"] == 0 < cut["exposed_seconds"]
    for one in (sharded, cut):
        parts = one["computing_seconds"] + one["exposed_seconds"] + one["waiting_seconds"]
        assert parts == pytest.approx(one["step_seconds"])
        assert one["computing_seconds"] > 0
        assert one["assumed"] is True


def test_sums_of_data_parallel_ranks_begin_inside_the_backward_pass(words, capsys, monkeypatch):
    monkeypatch.setattr(overlapped_reduce, "BUCKET", 20_000)
    copies = told(capsys, *words, "fine_tuning=Full", "data_parallel_degree=2")
    assert copies["hidden_seconds"] > 0
    monkeypatch.setattr(Engine, "overlapped_reduce", lambda *_: None)
    waits = told(capsys, *words, "fine_tuning=Full", "data_parallel_degree=2")
    assert waits["hidden_seconds"] == 0 < waits["exposed_seconds"]


def test_the_line_names_the_cluster_and_the_picture_is_printed(words, capsys):
    assert main([*words, *SHARDED, "--timeline", "-", "--cluster", "2x4xA100"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("timeline")]
    assert "for a step of 1 of 1 micro-batch on 2 x 4 A100 of 79 GiB: rank 0 computes" in line
    assert "hidden" in line
    assert "rank 0 " in out.split(line)[1]
    assert "G all_gather" in out


@pytest.mark.full
def test_a_slower_network_makes_a_longer_step(words, capsys):
    inside = told(capsys, *words, *SHARDED, "--cluster", "1x8xH200")
    across = told(capsys, *words, *SHARDED, "--cluster=8x1xH200")
    assert across["communication_seconds"] > inside["communication_seconds"]
    assert across["assumed"] is False


def test_a_file_is_an_svg_which_is_drawn_anew_but_replaces_no_other(words, capsys, tmp_path):
    target = tmp_path / "step.svg"
    for _ in range(2):
        assert main([*words, *SHARDED, "--timeline", str(target)]) == 0
        ElementTree.parse(target)
    assert f"{target}: 2 of 2 kinds of ranks" in capsys.readouterr().out
    for changed in (target.read_text().replace("rank 0", "the first"), "<svg>mine</svg>", ""):
        target.write_text(changed)
        assert main([*words, *SHARDED, "--timeline", str(target)]) == 2
        assert "was not drawn by erniekit, or was changed since" in capsys.readouterr().err
        assert target.read_text() == changed


def test_without_it_nothing_is_counted_or_told(words, capsys, monkeypatch):
    def counted(trace):
        raise AssertionError("streams are replaced")

    monkeypatch.setattr("erniekit.rehearse.counting.streams_seen", counted)
    assert main([*words, "tensor_parallel_degree=2", "--json"]) == 0
    assert "timeline" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--timeline"], "--timeline has no value"),
        (["--timeline", "step.png"], "not an SVG file"),
        (["--timeline", "nowhere/step.svg"], "no folder nowhere"),
        (["--cluster", "8xH200"], "--cluster only says how fast a timeline is"),
        (["--timeline", "-", "--cluster", "8xQ7"], "no data sheet"),
        (["--timeline", "-", "--cluster", "4xH200"], "the run has 8 ranks, and the cluster 4 devices"),
        (["--timeline", "-", "--cluster", "1xH200"], "the run has 8 ranks, and the cluster 1 device"),
        (["--timeline", "-", "--cluster", "8xCPU"], "nothing overlaps on CPU"),
        (["--timeline", "-", "--rank", "0"], "--rank does not run them"),
        (["--timeline", "-", "--shrunken", "2"], "--shrunken does not run them"),
    ],
)
def test_bad_input_is_three_lines_and_exit_code_2(words, capsys, more, says):
    assert main([*words, *SHARDED, *more]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "fix:" in err


def test_of_many_kinds_some_are_drawn_from_the_first_to_the_last_and_the_slowest():
    times = {rank: RankTimes(rank, 1.0) for rank in range(96)}
    alike = [[first, first + 1] for first in range(0, 96, 2)]
    for slow in (0, 41, 94):
        shown = [one.rank for one in drawn(times, alike, times[slow])]
        assert len(shown) == len(set(shown)) == 16
        assert slow in shown
        assert (shown[0], shown[-1]) == (0, 94)
    assert [one.rank for one in drawn(times, alike[:3], times[3])] == [0, 3, 4]


def test_links_are_those_inside_a_machine_between_machines_and_between_islands(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("islands: [2x4xH200, 1x4xA100]\nbetween_gb: 5\n")
    rates = ClusterRates(parse(str(path)))
    h200, a100 = rates_of(CARDS["h200"]), rates_of(CARDS["a100"])
    assert rates.link((0, 3)) == h200.link
    assert rates.link((0, 4)) == h200.network
    assert rates.link((8, 11)) == a100.link
    assert rates.link((0, 11)) == 5e9
    work = CountedWork(products=1e12)
    assert rates.seconds(7, work) == 1e12 / h200.dense
    assert rates.seconds(8, work) == 1e12 / a100.dense


def test_a_card_takes_its_rate_for_each_kind_of_work():
    rates = rates_of(CARDS["h200"])
    work = CountedWork(1e12, 2e12, 3e9, 4e9, {4096: 5e12})
    each = (1e12 / rates.dense, 2e12 / rates.grouped, 3e9 / rates.elementwise, 4e9 / rates.update)
    assert seconds(work, rates) == pytest.approx(sum(each) + 5e12 / rates.attention_at(4096))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0 ms"),
        (3e-11, "0.0 ms"),
        (4e-7, "0.4 µs"),
        (3.4e-5, "34 µs"),
        (2e-4, "0.2 ms"),
        (0.0321, "32.1 ms"),
        (2.5, "2.50 s"),
    ],
)
def test_times_are_readable_at_every_size(value, text):
    assert time_text(value) == text
