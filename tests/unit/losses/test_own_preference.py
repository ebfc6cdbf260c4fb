"""Preference losses of the user: a function of a Python session or a package in the place of `loss_type`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import erniekit
from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.loss_table import metric_name, preference_loss
from erniekit.losses.own_preference import PairLoss
from erniekit.recipes import stage_of

PAIRS = [{"prompt": f"What is {k}?", "chosen": f"Number {k}.", "rejected": "No."} for k in range(6)]
KEYS: dict[str, Any] = dict(
    stage="DPO", compute_type="fp32", device="cpu", learning_rate=5e-3, max_seq_len=64, doctor="off", report_to="none",
    dataset_num_proc=1, disable_tqdm=True, max_steps=2, beta=0.3,
)  # fmt: skip


def by_hand(chosen_logps, rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    return -F.logsigmoid(beta * (chosen_logps - reference_chosen_logps - rejected_logps + reference_rejected_logps))


def apart(chosen_logps, rejected_logps):
    return F.softplus(rejected_logps - chosen_logps)


def no_number(chosen_logps, rejected_logps):
    return (chosen_logps - rejected_logps) + (-chosen_logps.detach().abs() - 1).log()


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def keys(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    return dict(KEYS, model_name_or_path=model, data=PAIRS)


def test_the_built_in_loss_by_hand_is_the_built_in_run(keys: dict, tmp_path: Path) -> None:
    own = erniekit.train(**keys, loss=by_hand, output_dir=tmp_path / "own")
    built_in = erniekit.train(**keys, output_dir=tmp_path / "built-in")
    assert own.metrics["loss"] == pytest.approx(built_in.metrics["loss"], abs=1e-6)
    assert own.metrics["by_hand_loss"] == pytest.approx(own.metrics["loss"])
    with pytest.raises(ConfigError, match="is a function of a Python session, which is not at hand"):
        stage_of(load([str(own.output_dir / "recipe.yaml"), "loss_type=python:notes.by_hand"], "train"))


def test_a_function_that_gives_nan_is_named_with_its_steps_and_asks_for_no_reference(
    keys: dict, tmp_path: Path
) -> None:
    with pytest.raises(ErnieKitError, match=r"the loss function .*\.no_number gave losses or gradients") as told:
        erniekit.train(**keys | {"max_steps": 4, "max_bad_steps": 2}, loss=no_number, output_dir=tmp_path / "run")
    assert "2 steps in a row" in told.value.what
    assert "step 1: packs" in told.value.where
    assert "reference_free: False -> True (it takes no reference)" in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize(
    ("stage", "loss", "why"),
    [
        ("DPO", smoothed, "has the parameter 'logits', which is not given to it"),
        ("DPO", lambda beta: beta, "must take chosen_logps and rejected_logps"),
        ("DPO", 3, "cannot be called"),
        ("SFT", apart, "has the parameter 'chosen_logps', which is not given to it"),
        ("KTO", apart, "stage: KTO has one loss, against a baseline"),
        ("RM", apart, "stage: RM has a loss of the scores of its head"),
        ("CLS", smoothed, "stage: CLS has a loss of the scores of its head"),
    ],
)
def test_what_cannot_be_a_loss_of_the_stage_is_refused_before_anything_is_written(
    stage: str, loss: Any, why: str, keys: dict, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        erniekit.train(**keys | {"stage": stage}, loss=loss, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_losses_are_refused(keys: dict, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss is given, and loss_type: ipo"):
        erniekit.train(**keys, loss=apart, loss_type="ipo", output_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda chosen_logps, rejected_logps: 3.0, "gave float, not a tensor"),
        (lambda chosen_logps, rejected_logps: chosen_logps.mean(), r"the shape \[\] for 2 pairs"),
        (lambda chosen_logps, rejected_logps: chosen_logps.detach(), "do not depend on chosen_logps"),
    ],
)
def test_what_is_no_loss_of_each_pair_is_refused_by_the_functions_name(function: Any, why: str) -> None:
    values = {name: torch.zeros(2, requires_grad=True) for name in ("chosen_logps", "rejected_logps")}
    with pytest.raises(ConfigError, match=f"mine.*{why}"):
        PairLoss.of(function, "mine")(values)


def test_a_gradient_that_is_no_number_is_seen_once_and_bad_numbers_given_are_not_its_fault() -> None:
    loss = PairLoss.of(lambda chosen_logps, rejected_logps: (chosen_logps - rejected_logps).sqrt(), "mine")
    for values, failed in (((0.0, 1.0), True), ((1.0, 1.0), False), ((float("nan"), 1.0), False)):
        chosen = torch.tensor(values, requires_grad=True)
        loss({"chosen_logps": chosen, "rejected_logps": torch.zeros(2)}).sum().backward()
        assert loss.watch.failed() is failed
        assert not loss.watch.failed()


def test_a_stored_run_knows_what_a_sessions_loss_is_logged_as() -> None:
    assert metric_name("python:notes.losses.margin") == "margin_loss"
    assert preference_loss("python:notes.losses.margin").needs_reference
