"""Adapter files that lost their score head, hold numbers of another kind, or two adapters at once are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.errors import CheckpointError
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.score_head import FILE, classes_of
from erniekit.lora.settings import LoRASettings

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(ernie, trained):
    return trained(ernie, LoRASettings.resolve(rank=3))


@pytest.fixture
def written(model, tmp_path: Path) -> Path:
    write_adapter(tmp_path, adapter_of(model, LoRASettings.resolve(rank=3)), model)
    return tmp_path


def change(folder: Path, how: Callable[[Tensors], Tensors]) -> None:
    save_file(how(load_file(folder / WEIGHTS)), folder / WEIGHTS)


@pytest.mark.parametrize("told", [{"task_type": "SEQ_CLS"}, {"modules_to_save": ["classifier", "score"]}])
def test_a_classifiers_adapter_without_its_head_is_refused(told: dict, written: Path, model) -> None:
    config = json.loads((written / CONFIG).read_text())
    (written / CONFIG).write_text(json.dumps(config | told))
    with pytest.raises(CheckpointError, match="trained with a score head"):
        read_adapter(written, model)


def test_classes_without_a_head_are_refused_before_a_base_is_opened(written: Path) -> None:
    assert classes_of(written) == ()
    (written / FILE).write_text('{"id2label": {"0": "a"}}')
    with pytest.raises(CheckpointError, match="trained with a score head"):
        classes_of(written)


def test_whole_numbers_are_no_weights(written: Path, model) -> None:
    change(written, lambda tensors: {name: value.to(torch.int8) for name, value in tensors.items()})
    with pytest.raises(CheckpointError, match="holds int8 numbers"):
        read_adapter(written, model)


def test_two_adapters_in_one_file_are_refused(written: Path, model) -> None:
    again = {".lora_A.weight": ".lora_A.second.weight", ".lora_B.weight": ".lora_B.second.weight"}

    def twice(tensors: Tensors) -> Tensors:
        more = {name.replace(a, b): value.clone() for name, value in tensors.items() for a, b in again.items()}
        return {**more, **tensors}

    change(written, twice)
    with pytest.raises(CheckpointError, match="twice, as of two adapters"):
        read_adapter(written, model)


def test_a_file_without_updates_is_no_adapter(written: Path, model) -> None:
    change(written, lambda tensors: {})
    with pytest.raises(CheckpointError, match="no lora_A and lora_B"):
        read_adapter(written, model)
