"""More steps for a run that has ended: as if it had been one long run, or one key that says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.errors import ConfigError

OFF = dict(doctor="off")


@pytest.mark.parametrize(
    "schedule",
    [
        dict(lr_scheduler_type="constant"),
        pytest.param(dict(lr_scheduler_type="constant_with_warmup", warmup_steps=2), marks=pytest.mark.full),
        pytest.param(dict(lr_scheduler_type="cosine", decay_steps=8), marks=pytest.mark.full),  # it spans its own steps
        dict(lr_scheduler_type="wsd", lr_scheduler="wsd:5"),  # the decay had not begun
    ],
    ids=lambda keys: keys["lr_scheduler_type"],
)
def test_more_steps_of_a_rate_that_does_not_depend_on_them_are_one_long_run(
    schedule: dict, train: Callable, weights: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """6 steps are more than an epoch: its end must come where it would have come."""
    train(tmp_path / "long", max_steps=6, **schedule, **OFF)
    train(tmp_path / "run", max_steps=3, **schedule, **OFF)
    train(tmp_path / "run", max_steps=6, **schedule, **OFF)
    assert "extend   3 -> 6 steps" in capsys.readouterr().out
    want = weights(tmp_path / "long" / "checkpoint-6")
    assert weights(tmp_path / "run" / "checkpoint-6") == want
    assert any(name.startswith("optimizer") for name in want)
    assert weights(tmp_path / "run") == weights(tmp_path / "long"), "and so is the result"


def test_more_epochs_likewise(train: Callable, weights: Callable, tmp_path: Path) -> None:
    keys = dict(max_steps=-1, lr_scheduler_type="constant", gradient_accumulation_steps=2, **OFF)
    train(tmp_path / "long", num_train_epochs=2, **keys)
    train(tmp_path / "run", num_train_epochs=1, **keys)
    result = train(tmp_path / "run", num_train_epochs=2, **keys)
    assert result.steps > 1
    assert weights(tmp_path / "run") == weights(tmp_path / "long")


def test_a_rate_that_depends_on_the_end_is_explained_and_extended_with_one_key(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = dict(lr_scheduler_type="linear", learning_rate=1e-3, **OFF)
    train(tmp_path, max_steps=4, **keys)
    capsys.readouterr()
    train(tmp_path, max_steps=4, **keys)
    assert "to train on, raise max_steps or num_train_epochs and set extend_run=True" in capsys.readouterr().out
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, max_steps=8, **keys)
    assert "from 0.00025 at step 4 to 0.0005 at step 5" in caught.value.where
    assert "the order of the data stays" in caught.value.where
    assert "extend_run: True" in caught.value.fix
    assert "override" not in str(caught.value)
    result = train(tmp_path, max_steps=8, extend_run=True, **keys)
    assert result.steps == 8
    with pytest.raises(ConfigError, match="learning_rate"):  # and nothing else
        train(tmp_path, max_steps=12, extend_run=True, **{**keys, "learning_rate": 2e-3})


def test_fewer_steps_are_no_extension(train: Callable, tmp_path: Path) -> None:
    train(tmp_path, max_steps=4, lr_scheduler_type="linear", **OFF)
    with pytest.raises(ConfigError, match="max_steps: 4 -> 3"):
        train(tmp_path, max_steps=3, lr_scheduler_type="linear", extend_run=True, **OFF)
