"""Training that goes on from an adapter (`lora_path`): its own rank and scale, the run's own learning rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from erniekit.cli.main import main
from erniekit.errors import ConfigError

RATE = 1e-3
SHORT = dict(
    fine_tuning="LoRA", max_steps=1, doctor="off", learning_rate=RATE, lr_scheduler_type="constant", warmup_steps=0,
    weight_decay=0.0, adam_epsilon=1e-12,
)  # fmt: skip


@pytest.fixture
def adapter(train: Callable, tmp_path: Path) -> Path:
    """Of rank 4 and alpha 12: neither the default nor the usual twice the rank."""
    train(tmp_path / "first", **{**SHORT, "lora_rank": 4, "lora_alpha": 12, "max_steps": 2})
    return tmp_path / "first"


def moved(before: Path, after: Path, side: str) -> float:
    """The most that a number of all A or B has changed: of Adam's first step, the learning rate."""
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (before, after))
    return max(float((new[n] - value).abs().max()) for n, value in old.items() if f"lora_{side}" in n)


def recorded(folder: Path) -> dict[str, tuple[object, str]]:
    config = json.loads((folder / "run.json").read_text())["config"]
    return {row["key"]: (row["value"], row["origin"]) for row in config}


@pytest.mark.parametrize(("words", "times"), [({}, 1.0), (dict(lora_plus_scale=4.0), 4.0)])
def test_b_learns_as_much_faster_as_is_asked_from_an_adapter_too(
    words: dict[str, float], times: float, train: Callable, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "next", **SHORT, lora_path=adapter, **words)
    assert moved(adapter, tmp_path / "next", "A") == pytest.approx(RATE, rel=1e-2)
    assert moved(adapter, tmp_path / "next", "B") == pytest.approx(times * RATE, rel=1e-2)
    said = capsys.readouterr().out
    assert "LoRA rank 4, alpha 12, fp32" in said
    line = f"adapter  training continues from {adapter}; rank 4 and alpha 12 are its own"
    assert [each for each in said.splitlines() if "adapter's own" in each or "are its own" in each] == [line]
    told = recorded(tmp_path / "next")
    assert told["lora_rank"] == (4, "derived")
    assert told["lora_alpha"] == (12, "derived")
    assert told["lora_plus_scale"][0] == times


def test_rslora_plus_trains_b_faster_from_an_adapter_that_has_its_scale(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "first", **SHORT, lora_rank=4, rslora_plus=True)
    train(tmp_path / "next", **SHORT, lora_path=tmp_path / "first", rslora_plus=True)
    assert moved(tmp_path / "first", tmp_path / "next", "B") == pytest.approx(4 * RATE, rel=1e-2)
    assert recorded(tmp_path / "next")["rslora"][0] is True


@pytest.mark.parametrize(
    ("words", "what", "leave"),
    [
        (dict(lora_rank=8), "lora_rank is 8; the adapter that training starts from has 4", "leave lora_rank out"),
        (dict(lora_alpha=8), "lora_alpha is 8; the adapter that training starts from has 12", "leave lora_alpha out"),
        (dict(rslora=True), "rslora is True; the adapter that training starts from has False", "leave rslora out"),
        (dict(rslora_plus=True), "lora_alpha is 4 (rslora_plus is True); the adapter", "leave rslora_plus out"),
    ],
)
def test_a_rank_or_scale_that_is_not_the_adapters_is_refused_before_data_is_read(
    words: dict[str, object], what: str, leave: str, train: Callable, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "no.jsonl").write_text("whoever reads this finds no JSON")
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "next", **SHORT, lora_path=adapter, train_dataset_path=tmp_path / "no.jsonl", **words)
    assert what in caught.value.what
    assert leave in caught.value.fix
    assert str(adapter) in caught.value.where


def test_the_adapters_own_rank_and_targets_may_be_repeated(train: Callable, adapter: Path, tmp_path: Path) -> None:
    train(tmp_path / "next", **SHORT, lora_path=adapter, lora_rank=4)
    assert recorded(tmp_path / "next")["lora_alpha"] == (12, "derived")


def test_the_doctor_shows_the_adapters_rank(
    tiny_model: Path, rows: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = dict(model_name_or_path=tiny_model, train_dataset_path=rows, output_dir=tmp_path / "d", lora_path=adapter)
    assert main(["doctor", *(f"{k}={v}" for k, v in words.items()), "max_seq_len=96", "device=cpu"]) == 0
    assert "LoRA rank 4, alpha 12" in capsys.readouterr().out
