"""`erniekit train` on a model with experts, from its checks to its files: all weights, adapters, stop and resume."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import erniekit
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import Preempted
from erniekit.train.metrics import LogHook

ALL = dict(
    moe_aux_loss_lambda=1e-2,
    moe_z_loss_lambda=1e-3,
    moe_orthogonal_loss_lambda=1e-2,
    moe_use_aux_free_update_coef=1e-2,
    num_nextn_predict_layers=1,
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


@pytest.fixture
def go(moe: Path, train: Callable) -> Callable:
    def run(output: Path, **keys: Any) -> Any:
        return train(output, **{"model_name_or_path": moe, "max_steps": 4, **keys})

    return run


def logged(output: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if "loss" in record]


def states(*folders: Path) -> list[dict[str, torch.Tensor]]:
    return [ModelFolder(folder).build().state_dict() for folder in folders]


def test_all_weights_bias_and_further_layers_are_trained_and_everything_is_told(
    go: Callable, moe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path / "out", **ALL)
    said = capsys.readouterr().out
    assert "of them used per token" in said
    assert "packed documents do not see each other" in said
    records = logged(tmp_path / "out")
    told = {"router_aux", "router_z", "router_ortho", "mtp_loss", "moe_load", "moe_dead_experts"}
    assert all(told <= set(record) for record in records)
    before, after = states(moe, tmp_path / "out")
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    moved = (after["layers.1.mlp.router.bias"] - before["layers.1.mlp.router.bias"]).abs() / 1e-2
    assert torch.allclose(moved, moved.round(), atol=1e-4), "whole steps of the update"
    assert float(moved.max()) <= 4


def test_left_alone_the_bias_and_the_further_layers_come_out_as_they_went_in(
    go: Callable, moe: Path, tmp_path: Path
) -> None:
    go(tmp_path / "out")
    before, after = states(moe, tmp_path / "out")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("mtp.") or name.endswith("router.bias")}
    assert "mtp_loss" not in logged(tmp_path / "out")[0]


def test_router_losses_change_what_is_learnt_but_not_the_loss_that_is_told(go: Callable, tmp_path: Path) -> None:
    go(tmp_path / "with", moe_aux_loss_lambda=1.0)
    go(tmp_path / "without", moe_aux_loss_lambda=0.0)
    a, b = ([r["loss"] for r in logged(tmp_path / name)] for name in ("with", "without"))
    assert a[0] == b[0]
    assert a[1:] != b[1:]


def test_a_stopped_run_goes_on_bit_for_bit_with_bias_and_further_layers(
    go: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers drops the further layers when it loads a model, and has no bias update to go on with."""
    go(tmp_path / "whole", doctor="off", **ALL)
    plain = LogHook.after_step

    def stopping(self: LogHook, trainer: Any, result: Any) -> None:
        plain(self, trainer, result)
        if result.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LogHook, "after_step", stopping)
        with pytest.raises(Preempted):
            go(tmp_path / "cut", doctor="off", **ALL)
    assert [p.name for p in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    go(tmp_path / "cut", **ALL)  # with the checks, which must leave no trace
    assert weights(tmp_path / "cut" / "checkpoint-4") == weights(tmp_path / "whole" / "checkpoint-4")
    timed = ("second", "runtime", "wait")
    a, b = ([{k: v for k, v in r.items() if not any(word in k for word in timed)} for r in logged(tmp_path / x)]
            for x in ("cut", "whole"))  # fmt: skip
    assert a == b


def test_adapters_train_over_experts_and_leave_bias_and_further_layers_alone(go: Callable, tmp_path: Path) -> None:
    go(tmp_path / "out", fine_tuning="LoRA", moe_use_aux_free_update_coef=1e-2, max_steps=2)
    records = logged(tmp_path / "out")
    assert all(r["router_aux"] > 0 for r in records)
    model, _ = erniekit.load(tmp_path / "out")
    assert float(model.layers[1].mlp.router.bias.abs().max()) == 0.0


def test_eval_reads_the_result(go: Callable, rows: Path, tmp_path: Path) -> None:
    go(tmp_path / "out", max_steps=1)
    result = erniekit.run(
        "eval", output_dir=tmp_path / "out", eval_dataset_path=rows, max_seq_len=96, compute_type="fp32", device="cpu",
        moe_use_aux_free=False,
    )  # fmt: skip
    assert result.metrics["eval_loss"] > 0
