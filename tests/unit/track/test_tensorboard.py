"""TensorBoard: real event files, read back with TensorBoard's own reader."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from erniekit.track import make_trackers


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_scalars_land_in_logging_dir_under_erniekit_tags(tmp_path):
    trackers = make_trackers(["tensorboard"], tmp_path / "out", tmp_path / "logs", disable_tqdm=True)
    trackers.start(2)
    trackers.log(1, {"loss": 2.5, "learning_rate": 0.5})
    trackers.log(2, {"loss": 1.5, "learning_rate": 0.25})
    trackers.log(2, {"eval_loss": 1.25}, "eval")
    trackers.event(2, "save", "checkpoint-2")
    trackers.log(2, {"train_loss": 2.0}, "end")
    assert trackers.names == ["jsonl", "console", "tensorboard"], "no tracker was switched off"
    trackers.close()
    found = scalars(tmp_path / "logs")
    assert found["train/loss"] == [(1, 2.5), (2, 1.5)]
    assert found["train/learning_rate"] == [(1, 0.5), (2, 0.25)]
    assert found["eval/loss"] == [(2, 1.25)]
    assert found["train/train_loss"] == [(2, 2.0)]


def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path):
    for start, stop, loss in ((0, 5, 9.0), (2, 6, 1.0)):
        trackers = make_trackers(["tensorboard"], tmp_path, disable_tqdm=True)
        trackers.start(6, start_step=start)
        for step in range(start + 1, stop + 1):
            trackers.log(step, {"loss": loss})
        trackers.close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert scalars(folder)["train/loss"] == [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]
