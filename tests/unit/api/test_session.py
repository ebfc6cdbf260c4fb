"""A notebook user's session: own rows, callbacks and a loss in; numbers, answers, a picture and an export out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

import erniekit
from erniekit.errors import CheckpointError, ConfigError, DataError, ErnieKitError

from .conftest import KEYS, ROWS


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape == (len(labels), 1280)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


class Watch(erniekit.Hook):
    def __init__(self) -> None:
        self.moments: list[str] = []

    def on_start(self, trainer: Any) -> None:
        self.moments.append("start")

    def after_step(self, trainer: Any, result: erniekit.StepResult) -> None:
        self.moments.append(f"step {result.step} of {trainer.max_steps}")
        assert any(p.requires_grad for p in trainer.model.parameters())

    def on_end(self, trainer: Any) -> None:
        self.moments.append("end")


class Record(erniekit.Tracker):
    def __init__(self) -> None:
        self.logged: list[tuple[int, str]] = []

    def log(self, step: int, metrics: Any, kind: str) -> None:
        self.logged.append((step, kind))


@pytest.fixture(scope="module")
def session(base: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    watch, record, losses = Watch(), Record(), []
    run = erniekit.train(
        {"model_name_or_path": base, "fine_tuning": "LoRA", **KEYS, "doctor": "on"},
        data=ROWS,
        eval_data=iter(ROWS[:3]),
        output_dir=tmp_path_factory.mktemp("runs") / "own",
        max_steps=4,
        save_steps=2,
        evaluation_strategy="steps",
        eval_steps=2,
        callbacks=[watch, record, lambda result: losses.append(result.loss)],
        loss=smoothed,
    )
    return SimpleNamespace(run=run, watch=watch, record=record, losses=losses)


def test_callbacks_are_given_each_moment_each_step_and_what_is_logged(session: SimpleNamespace) -> None:
    assert session.watch.moments == ["start", *(f"step {k} of 4" for k in (1, 2, 3, 4)), "end"]
    assert session.losses == session.run.metrics["loss"]
    assert session.record.logged == [(1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"), (4, "end")]  # fmt: skip  # noqa: E501


def test_a_run_has_its_numbers_as_a_table_its_best_checkpoint_and_a_picture(session: SimpleNamespace, tmp_path) -> None:
    run = session.run
    assert (run.status, run.steps) == ("finished", 4)
    assert run.metrics["loss"][0] > run.metrics["loss"][-1]
    assert "ppl" not in run.metrics.columns, "an own loss has no perplexity"
    assert "eval_ppl" not in run.metrics.columns
    best = min((row["eval_loss"], row["global_step"]) for row in run.metrics if "eval_loss" in row)[1]
    assert run.best_checkpoint == run.output_dir / f"checkpoint-{best}"
    assert [path.name for path in run.checkpoints] == ["checkpoint-2", "checkpoint-4"]
    frame = run.metrics.to_pandas()
    assert frame["loss"].dropna().tolist() == run.metrics["loss"]
    assert run.metrics._repr_html_().count("<tr>") == 1 + len(run.metrics)
    with pytest.raises(ConfigError, match="did you mean 'eval_loss'"):
        run.metrics["eval_los"]
    picture = run.plot("loss", "learning_rate", path=tmp_path / "curves.svg")
    assert len(ElementTree.fromstring(picture.svg).findall(".//{*}path")) == 3, "train, evaluation, rate"
    assert (tmp_path / "curves.svg").read_text() == picture._repr_svg_()
    with pytest.raises(ConfigError, match="exists"):
        picture.save(tmp_path / "curves.svg")
    with pytest.raises(ConfigError, match=r"does not end in \.svg"):
        picture.save(tmp_path / "curves.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        run.plot("loss", path=tmp_path / "absent" / "curves.svg")
    again = erniekit.TrainingRun(run.output_dir)
    assert (again.metrics, again.summary, again.steps) == (run.metrics, run.summary, 4)
    with pytest.raises(CheckpointError, match="holds no run"):
        erniekit.TrainingRun(tmp_path)


def test_a_run_chats_and_its_export_answers_the_same(session: SimpleNamespace) -> None:
    run, greedy = session.run, dict(temperature=0, max_new_tokens=8)
    said = run.chat("What is 3?", **greedy)
    assert said
    assert said == run.generate([{"role": "user", "content": "What is 3?"}], **greedy)
    folder = run.export()
    assert folder == run.output_dir / "export"
    with erniekit.load(folder) as merged:
        assert merged.chat("What is 3?", **greedy) == said


def test_rows_given_in_memory_are_a_file_of_the_run_that_its_report_names(session: SimpleNamespace) -> None:
    (file,) = session.run.output_dir.glob("data-*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    story = json.loads((session.run.output_dir / "run.json").read_text())
    values = {row["key"]: row["value"] for row in story["config"]}
    assert values["token_loss"] == f"python:{__name__}.smoothed"
    assert file.name in json.dumps(story["data"])


def test_the_same_call_resumes_with_the_same_rows_and_loss_and_no_others(
    session: SimpleNamespace, base, tmp_path
) -> None:
    keys = dict(model_name_or_path=base, output_dir=tmp_path / "run", max_steps=4, save_steps=1, **KEYS)

    class Stop(erniekit.Hook):
        def after_step(self, trainer: Any, result: erniekit.StepResult) -> None:
            if result.step == 2:
                trainer.stop("enough")

    whole = erniekit.train(**{**keys, "output_dir": tmp_path / "whole"}, data=ROWS, loss=smoothed)
    half = erniekit.train(**keys, data=ROWS, loss=smoothed, callbacks=[Stop()])
    assert half.steps == 2
    with pytest.raises(ConfigError, match=r"token_loss: 'python:.*smoothed' -> 'cross_entropy'"):
        erniekit.train(**keys, data=ROWS)
    with pytest.raises(ConfigError, match="train data"):
        erniekit.train(**keys, data=ROWS[:-1], loss=smoothed)
    rest = erniekit.train(**keys, data=(row for row in ROWS), loss=smoothed)
    assert rest.steps == 4
    assert rest.metrics["loss"] == whole.metrics["loss"]


def test_a_loss_or_a_callback_that_cannot_be_one_is_refused_before_anything_is_written(base: Path, tmp_path) -> None:
    keys = dict(model_name_or_path=base, output_dir=tmp_path / "run", data=ROWS, max_steps=1, **KEYS)
    for loss, why in (
        (lambda logits, target: logits, "parameter 'target'"),
        (lambda labels: labels, "one of logits and logprobs"),
        (3, "int, which cannot be called"),
    ):
        with pytest.raises(ConfigError, match=why):
            erniekit.train(**keys, loss=loss)
    with pytest.raises(ConfigError, match="stage: VL-SFT has a loss of its own"):
        erniekit.train(**keys, loss=smoothed, stage="VL-SFT")
    with ThreadPoolExecutor() as pool, pytest.raises(ConfigError, match="only the main thread receives"):
        pool.submit(erniekit.train, **keys).result()
    with pytest.raises(ConfigError, match="the class Watch is not a callback"):
        erniekit.train(**keys, callbacks=[Watch])
    with pytest.raises(ConfigError, match="did you mean callbacks"):
        erniekit.train(**keys, callback=[print])
    with pytest.raises(ConfigError, match="both name rows"):
        erniekit.train(**keys, train_dataset_path="rows.jsonl")
    with pytest.raises(ConfigError, match="is not a recipe"):
        erniekit.train("recipe.txt", **keys)
    with pytest.raises(ConfigError, match="the first argument is a list, where a recipe belongs"):
        erniekit.train(ROWS, **keys)
    with pytest.raises(ConfigError, match="no model is named by None"):
        erniekit.load(None)
    with pytest.raises(CheckpointError, match="nowhere"):
        erniekit.train(**{**keys, "model_name_or_path": "nowhere"})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"the shape \[\] for \d+ trained tokens; reduction='none'"):
        erniekit.train(**keys, loss=lambda logits, labels: F.cross_entropy(logits, labels))


def endless() -> Iterator[Any]:
    yield ROWS[0]
    yield "no row"


class Parts(dict):
    """As a DatasetDict."""


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "holds no rows"),
        (endless(), "data: row 2"),
        ({"train": ROWS}, "one mapping with train"),
        (Parts(train=ROWS), r"data=parts\['train'\]"),
        (7, "int, which holds no rows"),
        ([{"a": object()}], "data: row 1"),
        ([{"a": [float("nan")]}], "cannot be written as JSON"),
        ([{"a": "\ud800"}], "lone surrogate"),
        ([{1, 2}], "set, not a dict"),
    ],
)
def test_what_holds_no_rows_is_refused_with_the_row(rows: Any, why: str, base: Path, tmp_path) -> None:
    with pytest.raises(DataError) as raised:
        erniekit.train(model_name_or_path=base, data=rows, output_dir=tmp_path / "run", **KEYS)
    assert re.search(why, str(raised.value))
    assert not (tmp_path / "run").exists()


def test_frames_and_numbers_of_numpy_are_rows(tmp_path) -> None:
    import numpy as np
    import pandas

    from erniekit.data.given_rows import GivenRows

    frame = GivenRows(pandas.DataFrame([{"src": "a", "n": np.int64(3)}]), "data")
    plain = GivenRows([{"src": "a", "n": 3}], "data")
    assert frame.sha256 == plain.sha256

    assert json.loads(GivenRows([{"x": np.arange(3)}], "data").write(tmp_path).read_text()) == {"x": [0, 1, 2]}


def not_a_number(logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs - logprobs.detach()).sqrt() - logprobs  # finite itself, its gradient is not


def no_number(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none") + (-logits.abs().sum(1) - 1).log()


@pytest.mark.parametrize("loss", [pytest.param(not_a_number, marks=pytest.mark.full), no_number])
def test_a_loss_function_that_gives_nan_is_named_with_its_steps_and_not_the_weights(
    loss: Any, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = dict(model_name_or_path=base, data=ROWS, output_dir=tmp_path / "run", max_steps=4, max_bad_steps=2, **KEYS)
    with pytest.raises(ErnieKitError, match=rf"the loss function .*\.{loss.__name__} gave losses or gradients") as told:
        erniekit.train(**keys, loss=loss)
    assert "2 steps in a row" in told.value.what
    assert "step 1: packs" in told.value.where
    assert "clamp(min=1e-6)" in told.value.fix
    assert f"{loss.__name__} gave: update skipped" in capsys.readouterr().err
    if loss is not_a_number:
        with pytest.raises(
            ErnieKitError, match=r"a gradient is not finite: the loss function .*\.not_a_number gave it"
        ):
            erniekit.train(**{**keys, "doctor": "on", "output_dir": tmp_path / "other"}, loss=loss)


def test_empty_cells_of_a_frame_are_missing_fields_and_classes_are_those_of_the_given_rows(
    base: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"text": ["a", "b", None, "d"], "label": ["y", "x", "y", float("nan")]})
    keys = dict(model_name_or_path=base, data=table, stage="CLS", max_steps=1, **KEYS)
    with pytest.raises(DataError, match="2 of 4 rows"):
        erniekit.train(**keys, output_dir=tmp_path / "few")
    run = erniekit.train(**keys, output_dir=tmp_path / "run", max_bad_fraction=0.5)
    assert run.model.config.labels == ("x", "y")


@pytest.mark.full
def test_a_models_own_classes_are_kept_where_given_rows_have_no_others(base: Path, tmp_path: Path) -> None:
    keys = dict(stage="CLS", max_steps=1, **KEYS)
    rows = [{"text": "a", "label": "y"}, {"text": "b", "label": "x"}]
    run = erniekit.train(model_name_or_path=base, data=rows, output_dir=tmp_path / "run", **keys)
    more = erniekit.train(model_name_or_path=run.output_dir, data=rows[:1], output_dir=tmp_path / "more", **keys)
    assert more.model.config.labels == ("x", "y")
