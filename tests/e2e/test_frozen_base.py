"""`frozen_base: fp8` from start to end on a CPU: what is learnt, stop and resume, and the adapter that comes out."""

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
from erniekit.export.run import export
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.inject import lora_linears
from erniekit.lora.merge import row_updates
from erniekit.recipes import build as building
from erniekit.recipes.built import Built
from erniekit.train.metrics import LogHook
from support.merged import merged_tensor

LORA = dict(fine_tuning="LoRA", lora_rank=8, learning_rate=5e-3, doctor="off")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


@pytest.fixture
def go(moe: Path, train: Callable) -> Callable:
    def run(output: Path, **keys: Any) -> Any:
        return train(output, **{"model_name_or_path": moe, "max_steps": 10, **LORA, **keys})

    return run


def losses(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_ten_steps_over_an_fp8_base_learn_what_they_learn_over_the_weights_themselves(
    go: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Built] = []
    usual = building.build
    monkeypatch.setattr("erniekit.recipes.training.build", lambda *args: built.append(usual(*args)) or built[-1])
    for kind in ("bf16", "fp8"):
        go(tmp_path / kind, frozen_base=kind)
    turned = [
        sum(getattr(layer.base, "is_packed", False) for _, layer in lora_linears(one.engine.parts[0])) for one in built
    ]
    assert turned == [0, 10]
    assert built[0].total() == built[1].total()
    assert built[0].trainable() == built[1].trainable()
    plain, small = losses(tmp_path / "bf16"), losses(tmp_path / "fp8")
    assert len(small) == 10
    assert small[-1] < 0.8 * small[0]
    assert plain != small
    # products are off by 4 % each; of the loss, a mean over tokens, little of that is left
    assert all(abs(a - b) < 0.03 * a for a, b in zip(plain, small)), list(zip(plain, small))


def test_a_stopped_run_goes_on_bit_for_bit(
    go: Callable, weights: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "whole", frozen_base="fp8", max_steps=4)
    plain = LogHook.after_step

    def stopping(self: LogHook, trainer: Any, result: Any) -> None:
        plain(self, trainer, result)
        if result.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(LogHook, "after_step", stopping)
        with pytest.raises(Preempted):
            go(tmp_path / "cut", frozen_base="fp8", max_steps=4)
    go(tmp_path / "cut", frozen_base="fp8", max_steps=4)
    assert weights(tmp_path / "cut" / "checkpoint-4") == weights(tmp_path / "whole" / "checkpoint-4")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_a_merged_export_is_the_adapter_on_the_weights_as_they_were_stored(
    go: Callable, moe: Path, tmp_path: Path
) -> None:
    go(tmp_path / "out", frozen_base="fp8", max_steps=2)
    saved = {p.name for p in (tmp_path / "out").glob("*.safetensors")}
    assert saved == {"adapter_model.safetensors", "probe.safetensors"}
    merged = ModelFolder(export(moe, tmp_path / "out", tmp_path / "merged")).build().state_dict()
    base = ModelFolder(moe).build()
    updates = row_updates(base, read_adapter(tmp_path / "out", base))
    assert len(updates) == 10
    for name, weight in base.state_dict().items():
        assert torch.equal(merged[name], merged_tensor(weight, updates[name]) if name in updates else weight), name


@pytest.mark.full
def test_the_export_command_proves_the_merge_and_not_the_fp8_answers(go: Callable, moe: Path, tmp_path: Path) -> None:
    go(tmp_path / "out", frozen_base="fp8", max_steps=2)
    erniekit.run("export", model_name_or_path=moe, output_dir=tmp_path / "out", lora=True)
    assert ModelFolder(tmp_path / "out" / "export").check_names() is None


@pytest.mark.full
def test_preferences_are_learnt_with_the_fp8_base_as_their_reference(
    paddle: Path, moe: Path, tmp_path: Path, train: Callable
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"src": [f"Say {word}."], "tgt": [], "response": [word, word[::-1]], "sort": [1, 0]}
        for word in ("river", "stone", "lamp", "green", "quiet", "window")
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {**LORA, "frozen_base": "fp8", "stage": "DPO", "max_prompt_len": 48, "gradient_accumulation_steps": 1}
    train(tmp_path / "out", model_name_or_path=moe, train_dataset_path=pairs, max_steps=4, **keys)
    found = losses(tmp_path / "out")
    assert found[0] == pytest.approx(0.6931, abs=1e-4), "without adapters policy and reference are one"
    assert found[-1] < found[0]


def test_it_is_refused_without_adapters(go: Callable, tmp_path: Path) -> None:
    with pytest.raises(erniekit.errors.ConfigError, match="frozen_base"):
        go(tmp_path / "out", frozen_base="fp8", fine_tuning="Full")
