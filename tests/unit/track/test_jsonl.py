"""metrics.jsonl: every digit, every line at once, and one curve after a resume."""

from __future__ import annotations

import json
import math

from erniekit.files import own
from erniekit.track import make_trackers
from erniekit.track.jsonl import read


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder, start, stop):
    trackers = make_trackers([], folder, disable_tqdm=True)
    trackers.start(total_steps=stop, start_step=start)
    for step in range(start + 1, stop + 1):
        trackers.log(step, {"loss": 1 / step, "learning_rate": step / 3e5})
    return trackers


def test_floats_keep_every_digit_and_global_step_is_whole(tmp_path):
    run(tmp_path, 0, 3).close()
    assert lines(tmp_path) == [
        {"global_step": step, "loss": 1 / step, "learning_rate": step / 3e5} for step in (1, 2, 3)
    ]
    assert '"global_step": 3, "loss": 0.3333333333333333,' in (tmp_path / "metrics.jsonl").read_text()


def test_a_line_is_in_the_file_before_the_next_step(tmp_path):
    trackers = run(tmp_path, 0, 2)
    assert [line["global_step"] for line in lines(tmp_path)] == [1, 2]
    trackers.close()


def test_evaluations_have_lines_and_the_summary_of_the_run_has_none(tmp_path):
    trackers = run(tmp_path, 0, 1)
    trackers.log(1, {"eval_loss": 0.5}, "eval")
    trackers.event(1, "save", "checkpoint-1")
    trackers.log(1, {"train_loss": 0.7}, "end")
    trackers.close()
    assert lines(tmp_path)[1:] == [{"global_step": 1, "eval_loss": 0.5}]


def test_a_resume_drops_what_was_logged_after_its_checkpoint(tmp_path):
    trackers = run(tmp_path, 0, 5)
    trackers.log(5, {"eval_loss": 0.5}, "eval")
    trackers.close()
    with own(tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"global_step": 6, "lo')  # killed while writing
    trackers = run(tmp_path, 3, 6)
    trackers.close()
    assert [line["global_step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines(tmp_path)] == [1 / step for step in range(1, 7)]


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    run(tmp_path, 0, 5).close()
    run(tmp_path, 0, 2).close()
    assert [line["global_step"] for line in lines(tmp_path)] == [1, 2]


def test_values_that_are_not_finite_stay_strict_json(tmp_path):
    trackers = make_trackers([], tmp_path, disable_tqdm=True)
    trackers.start(1)
    trackers.log(1, {"loss": math.nan, "grad_norm": math.inf})
    trackers.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {
        "global_step": 1,
        "loss": None,
        "grad_norm": None,
    }


def test_reading_an_absent_file_gives_no_records(tmp_path):
    assert list(read(tmp_path / "metrics.jsonl")) == []
