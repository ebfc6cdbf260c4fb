"""What a family declares, compared with the model it builds: each mistake is refused before a weight is lost by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.models import llama
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.decoder import PLAN, Decoder
from erniekit.models.layers.linear import FusedLinear
from erniekit.models.names import Entry, rows, verbatim
from erniekit.models.spec import ModelSpec
from erniekit.parallel.plan import Plan, column, dealt, experts, heads, heads_in, row, vocab


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", family="llama")


class Wider(Decoder):
    """Llama with a norm of keys, a gate beside the query heads, and a projection of torch's own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.attn.k_norm = nn.RMSNorm(config.head_dim)
            layer.attn.gate = FusedLinear(config.hidden_size, (("gate", config.hidden_size),), False)
            layer.attn.pair = FusedLinear(config.hidden_size, (("one", 6), ("two", 6)), False)
            layer.attn.torchs = nn.Linear(config.hidden_size, 8, bias=False)


def wider_names(config: DecoderConfig, layout: str) -> list[Entry]:
    new = ("k_norm", "gate", "pair", "torchs")
    added = [f"layers.{i}.attn.{leaf}.weight" for i in range(config.num_layers) for leaf in new]
    return [*llama.names(config, layout), *(verbatim(name, f"model.{name}") for name in added)]


WIDER = replace(llama.SPEC, build=Wider, names=wider_names, paddle_prefix="")


def meta(tiny: Path, spec: ModelSpec, files: bool = False) -> nn.Module:
    folder = ModelFolder(tiny, weights=files)
    folder.spec = spec
    return folder.meta()


def names(change: Callable[[list[Entry]], list[Entry]]) -> ModelSpec:
    return replace(WIDER, names=lambda config, layout: change(wider_names(config, layout)))


LAST = "layers.1.attn.k_norm.weight"


def without(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.ours != LAST]


def with_another(entries: list[Entry]) -> list[Entry]:
    return [*entries, verbatim("layers.1.attn.q_norm.weight", "model.layers.1.q_norm.weight")]


def under_one_name(entries: list[Entry]) -> list[Entry]:
    return [*without(entries), verbatim(LAST, "model.layers.0.attn.k_norm.weight")]


def twice(entries: list[Entry]) -> list[Entry]:
    return [*entries, verbatim(LAST, "model.layers.1.also.weight")]


def of_other_sizes(entries: list[Entry]) -> list[Entry]:
    name = "layers.1.attn.pair.weight"
    return [*(e for e in entries if e.ours != name), rows(name, ("a.weight", "b.weight"), (6, 7))]


def of_fewer_rows(entries: list[Entry]) -> list[Entry]:
    name = "layers.1.attn.pair.weight"
    cut = Entry(name, ("a.weight",), lambda ts: ts[0], lambda t: [t[:5]])
    return [*(e for e in entries if e.ours != name), cut]


def of_one_name(entries: list[Entry]) -> list[Entry]:
    name = "layers.1.attn.pair.weight"
    return [*(e for e in entries if e.ours != name), replace(rows(name, ("a", "b"), (6, 6)), theirs=("a",))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_fewer_rows, r"layers.1.attn.pair.weight does not fit that weight, .*: it stores \[\[5, \d+\]\]"),
        (of_one_name, r"layers.1.attn.pair.weight does not fit that weight, .*: it makes 2 tensors for 1 names"),
        (without, rf"have no name in its files, so that training them would lose them: {LAST}"),
        (with_another, r"has entries for weights that its model has not: layers.1.attn.q_norm.weight"),
        (under_one_name, r"model.layers.0.attn.k_norm.weight is the name in a file of several tensors"),
        (twice, rf"{LAST} is stored by several entries"),
        (of_other_sizes, r"the entry of layers.1.attn.pair.weight does not fit that weight, \[12, \d+\]"),
    ],
)
def test_names_that_would_lose_a_weight_are_refused_with_the_family_and_the_weight(
    tiny: Path, change: Callable[[list[Entry]], list[Entry]], says: str
) -> None:
    assert meta(tiny, WIDER), "the family as it is passes"
    with pytest.raises(ConfigError, match=says) as caught:
        meta(tiny, names(change))
    assert "`names` of family llama" in caught.value.where
    assert "test_family_check" in caught.value.where


def planned(plan: dict[str, Any]) -> ModelSpec:
    return replace(WIDER, plan=plan | PLAN)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"*.attn.k_norm": column()}, r"'\*.attn.k_norm' is column\(\), which cuts erniekit's Linear .*a RMSNorm of"),
        ({"*.attn.torchs": column()}, r"layers.0.attn.torchs is a Linear of torch"),
        ({"*.attn.pair": column()}, r"is column\(1\), and layers.0.attn.pair holds 2 projections, of \[6, 6\] rows"),
        ({"*.attn.gate": column(parts=5)}, r"are not 5 equal parts"),
        ({"*.attn.pair": heads()}, r"is heads\(\), which cuts a fused qkv"),
        ({"*.attn.pair": heads_in(), "*.mlp.down": heads_in()}, r"is heads_in\(\), which cuts \d+ columns"),
        ({"*.attn.gate": vocab()}, r"is vocab\(\), which cuts a vocabulary: embed, head, head_bias"),
        ({"*.attn.gate": experts()}, r"is experts\(\), which cuts an ExpertLinear"),
        ({"*.attn_norm": row()}, r"is row\(\), which cuts erniekit's Linear"),
        ({"*.attn.gate": "column"}, r"'\*.attn.gate' is 'column', not a rule"),
    ],
)
def test_a_rule_that_nothing_can_cut_by_is_refused_whatever_the_layout(tiny: Path, plan: Plan, says: str) -> None:
    assert meta(tiny, planned({"*.attn.gate": column(), "*.attn.pair": column(parts=2), "*.attn.k_norm": dealt()}))
    with pytest.raises(ConfigError, match=says) as caught:
        meta(tiny, planned(plan))
    assert "plan" in caught.value.where


def test_a_family_that_fits_is_compared_once_a_folder_however_often_it_is_built(tiny: Path) -> None:
    folder, asked = ModelFolder(tiny), []

    def counted(config: DecoderConfig, layout: str) -> list[Entry]:
        asked.append(layout)
        return llama.names(config, layout)

    folder.spec = replace(folder.spec, names=counted)
    for _ in range(3):
        assert all(weight.is_meta for weight in folder.meta().parameters())
    assert asked == ["hf"]
    assert torch.equal(folder.build().norm.weight, ModelFolder(tiny).tensor("model.norm.weight"))


@pytest.mark.parametrize("folder", [pytest.param("llama_fused", marks=pytest.mark.full), "moe_old"])
def test_comparing_a_folder_with_its_family_imports_no_compiler(paddle: Path, folder: str) -> None:
    code = (
        "import sys; from erniekit.checkpoint.model_folder import ModelFolder; folder = ModelFolder(sys.argv[1]); "
        "folder.check_names(); folder.check_shapes(folder.meta()); print('sympy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(paddle / folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
