"""What a family's functions and tables are, and give: of another type than ModelSpec says, they are named at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.models import MODELS, llama
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.decoder import Decoder
from erniekit.models.spec import ModelSpec


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", family="llama")


def opened(tiny: Path, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr("erniekit.checkpoint.model_folder.find", lambda config, where: spec)
    return ModelFolder(tiny).meta()


def gives(found: Any) -> Callable[..., Any]:
    return lambda *given: found


def of_another_family(*given: Any) -> DecoderConfig:
    return replace(llama.read_config(*given), family="ernie4_5")


@pytest.mark.parametrize(
    ("field", "function", "says"),
    [
        ("read_config", gives(None), "gave None, not a DecoderConfig"),
        ("read_config", of_another_family, "gave the config of another family: ernie4_5"),
        ("settle", gives(None), "gave None, not a DecoderConfig"),
        ("layout_of", gives(3), "gave 3, not the name of a layout"),
        ("build", gives(None), "gave None, not a torch.nn.Module"),
        ("names", gives(None), "gave None, not a list of Entry"),
        ("names", gives([1, 2]), r"gave \[1, 2\], not a list of Entry"),
        ("write_config", gives(None), "gave None, not a dict"),
        ("write_config", gives({"a": b"x"}), "cannot be written as JSON: Object of type bytes"),
        ("write_config", gives({"model_type": "llama", "a": float("nan")}), "cannot be written as JSON"),
        ("write_config", gives({}), "writes model_type None, which is no family's"),
        ("write_config", gives({"model_type": "ernie4_5"}), "which is read as a model of family ernie4_5"),
    ],
)
def test_what_a_function_gives_is_compared_where_the_folder_is_opened(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, field: str, function: Callable[..., Any], says: str
) -> None:
    assert opened(tiny, llama.SPEC, monkeypatch), "the family as it is passes"
    with pytest.raises(ConfigError, match=says) as caught:
        opened(tiny, replace(llama.SPEC, **{field: function}), monkeypatch)
    assert caught.value.where == f"{function.__module__}, `{field}` of family llama"


class OneLayerTwice(Decoder):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.layers[1].mlp = self.layers[0].mlp


def test_a_module_in_two_places_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"layers.0.mlp.gate_up and layers.1.mlp.gate_up are one module"):
        opened(tiny, replace(llama.SPEC, build=OneLayerTwice), monkeypatch)


def test_a_family_made_from_another_has_its_own_name_in_errors() -> None:
    mine = replace(llama.SPEC, name="mine")
    with pytest.raises(ConfigError, match="of family mine gave the config of another family: llama"):
        mine.read_config({"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 1}, "hf", True, "config.json")  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lora_targets": None}, "has lora_targets=None in its ModelSpec, not a tuple of names"),
        ({"fp32": 7}, "has fp32=7 in its ModelSpec, not a tuple of names"),
        ({"fp32": "norm"}, "has fp32='norm' in its ModelSpec, not a tuple of names"),
        ({"plan": [1]}, r"has plan=\[1\] in its ModelSpec, not a dict"),
        ({"plan": {3: None}}, "has plan={3: None} in its ModelSpec, not a dict"),
        ({"build": None}, "has build=None in its ModelSpec, not a function"),
    ],
)
def test_tables_of_another_type_are_problems_of_an_installed_family(changed: dict[str, Any], says: str) -> None:
    assert not any(MODELS.get(name).problem() for name in MODELS.names())
    assert re.match(says, replace(llama.SPEC, **changed).problem())
