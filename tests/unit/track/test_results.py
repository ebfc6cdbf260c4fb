"""The end files ERNIEKit's users and HF's tools look for."""

from __future__ import annotations

import json

from erniekit.track import make_trackers
from erniekit.track.results import write_results, write_trainer_state


def load(path):
    return json.loads(path.read_text())


def test_train_and_eval_results_and_both_together(tmp_path):
    written = write_results(tmp_path, train={"train_loss": 1.5}, evaluation={"eval_loss": 2.5})
    assert sorted(path.name for path in written) == ["all_results.json", "eval_results.json", "train_results.json"]
    assert load(tmp_path / "train_results.json") == {"train_loss": 1.5}
    assert load(tmp_path / "eval_results.json") == {"eval_loss": 2.5}
    assert load(tmp_path / "all_results.json") == {"eval_loss": 2.5, "train_loss": 1.5}


def test_a_later_evaluation_joins_and_a_new_training_starts_anew(tmp_path):
    write_results(tmp_path, train={"train_loss": 1.5})
    write_results(tmp_path, evaluation={"eval_loss": 2.5})
    assert load(tmp_path / "all_results.json") == {"eval_loss": 2.5, "train_loss": 1.5}
    write_results(tmp_path, train={"train_loss": 0.5})
    assert load(tmp_path / "all_results.json") == {"train_loss": 0.5}


def test_trainer_state_has_the_log_history_up_to_its_step(tmp_path):
    trackers = make_trackers([], tmp_path, disable_tqdm=True)
    trackers.start(4)
    for step in (1, 2, 3, 4):
        trackers.log(step, {"loss": 1 / step, "progress_or_epoch": step / 4})
    trackers.log(2, {"eval_loss": 0.5}, "eval")
    trackers.close()
    checkpoint = tmp_path / "checkpoint-2"
    path = write_trainer_state(checkpoint, global_step=2, max_steps=4, metrics_from=tmp_path, epoch=0.5)
    state = load(path)
    assert [(entry["step"], entry.get("loss")) for entry in state["log_history"]] == [(1, 1.0), (2, 0.5), (2, None)]
    assert state["log_history"][0]["epoch"] == 0.25
    assert (state["global_step"], state["max_steps"], state["epoch"]) == (2, 4, 0.5)
    whole = load(write_trainer_state(tmp_path, global_step=4, max_steps=4, summary={"train_loss": 0.6}))
    assert whole["log_history"][-1] == {"train_loss": 0.6, "step": 4}
    assert len(whole["log_history"]) == 6


def test_trainer_state_is_readable_by_transformers_shape(tmp_path):
    state = load(write_trainer_state(tmp_path, global_step=0, max_steps=1, best_metric=0.5))
    assert state["best_metric"] == 0.5
    assert {"best_model_checkpoint", "epoch", "is_world_process_zero", "num_train_epochs", "total_flos"} <= set(state)
