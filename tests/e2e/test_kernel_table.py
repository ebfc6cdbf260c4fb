"""Which kernels a run uses: printed by the doctor, kept with the run, forced by a key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.kernels import stored as stored_kinds
from erniekit.kernels.selection import BY_KEYS, OPERATIONS, force
from erniekit.kernels.stored.int8 import Int8
from erniekit.models.layers import decoder
from erniekit.models.layers.mlp import MLP


@pytest.fixture(autouse=True)
def nothing_stays_forced() -> Iterator[None]:
    """A run that was refused leaves its choice behind, and later tests are in the same process."""
    yield
    force({})


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "experts", family="ernie4_5_moe")


def table(run: Path) -> dict[str, tuple[str, str]]:
    story = json.loads((run / "run.json").read_text())
    return {row["operation"]: (row["implementation"], row["reason"]) for row in story["kernels"]}


def test_a_run_keeps_what_was_chosen_and_why(train: Callable, experts: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, fine_tuning="LoRA")
    found = table(tmp_path)
    assert found["experts"] == ("plain", "triton: not on cpu")
    assert found["grouped products"] == (
        "loop",
        "quack: not on cpu; torch: not on cpu; blocks: no wait to be saved on a CPU",
    )
    assert found["packed attention"][0] == "sdpa"
    assert found["compiled layers"] == ("no", "no Triton for this device")
    assert found["CUDA graphs"] == ("no", "this kind of device replays no graphs")
    assert found["AdamW"][0] == "torch"
    assert found["results of a step"][0] == "at once"
    assert "quack: not on cpu; torch: not on cpu" in (tmp_path / "report.html").read_text()


def test_the_doctor_prints_it(train: Callable, experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", max_steps=1, model_name_or_path=experts)
    command = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    keys = {row["key"]: row["value"] for row in command}
    words = [f"{key}={keys[key]}" for key in ("model_name_or_path", "train_dataset_path", "train_dataset_type")]
    capsys.readouterr()
    assert main(["doctor", *words, f"output_dir={tmp_path / 'other'}", "device=cpu", "max_steps=1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("kernels"))
    assert lines[first].split()[1:3] == ["attention", "sdpa"]
    assert any(line.split()[:2] == ["experts", "plain"] for line in lines[first:])
    assert not any("of one process" in line for line in lines)
    keys = ["device=cpu", "max_steps=1", "tensor_parallel_degree=2"]
    assert main(["doctor", *words, f"output_dir={tmp_path / 'another'}", *keys]) == 0
    said = capsys.readouterr().out
    assert "note     kernels: of one process; ranks with tensor_parallel_degree=2 keep theirs in run.json" in said


def test_a_forced_kernel_is_used(train: Callable, experts: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, kernels="experts=plain")
    story = json.loads((tmp_path / "run.json").read_text())
    assert {"operation": "experts", "implementation": "plain", "reason": "forced by kernels"} in story["kernels"]


def test_one_that_is_all_there_is_may_be_forced(train: Callable, experts: Path, tmp_path: Path) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, kernels="packed attention=sdpa")
    found = table(tmp_path)
    assert found["packed attention"] == ("sdpa", "forced by kernels")
    assert found["attention"] == ("sdpa", "kernels for a card take 16-bit numbers")
    assert found.keys() <= {*OPERATIONS, *BY_KEYS}


def test_a_forced_kernel_of_an_operation_that_a_run_does_not_have_is_said(
    train: Callable, experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, kernels="paged attention=gathered,fp8 products=emulated")
    said = capsys.readouterr().out
    for word in ("paged attention=gathered", "fp8 products=emulated"):
        assert said.count(f"note     kernels: {word} has no effect: this run has no such operation\n") == 1


def test_a_feed_forward_of_another_family_is_not_called_the_fused_one(
    train: Callable, experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GatedGelu(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(F.gelu(gate) * up)

    dense = make_tiny_model(tmp_path / "dense")
    train(tmp_path / "usual", max_steps=1, model_name_or_path=dense)
    assert "feed-forward" in table(tmp_path / "usual")
    monkeypatch.setattr(decoder, "MLP", GatedGelu)
    train(tmp_path / "own", max_steps=1, model_name_or_path=dense)
    assert "feed-forward" not in table(tmp_path / "own")


class Wide(Int8):
    """Takes weights of some heights, or none at all."""

    name = "int8"
    takes: tuple[int, ...] = ()

    def fits(self, out: int, width: int) -> bool:
        return out in self.takes


def test_frozen_weights_and_products_are_those_that_layers_have(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, keys = make_tiny_model(tmp_path / "dense"), dict(max_steps=1, fine_tuning="LoRA", frozen_base="int8")
    train(tmp_path / "all", model_name_or_path=dense, **keys)
    found = table(tmp_path / "all")
    assert found["frozen weights"] == ("int8", "as configured")
    assert found["frozen products"] == ("float32", "unpacked to what the run computes in")
    monkeypatch.setitem(stored_kinds._LOADED, "int8", Wide())
    train(tmp_path / "none", model_name_or_path=dense, **keys)
    found = table(tmp_path / "none")
    assert found["frozen weights"] == ("float32", "int8 takes the widths of none of them")
    assert "frozen products" not in found
    model = ModelFolder(dense).build()
    monkeypatch.setattr(Wide, "takes", (model.get_submodule("layers.0.mlp.gate_up").out_features,))
    train(tmp_path / "some", model_name_or_path=dense, **keys)
    count = len(model.layers)
    assert table(tmp_path / "some")["frozen weights"] == (
        "int8",
        f"as configured; {3 * count} of {4 * count} stay float32",
    )


def test_a_base_in_fp8_has_the_products_of_one(train: Callable, experts: Path, tmp_path: Path) -> None:
    keys = dict(max_steps=1, model_name_or_path=experts, fine_tuning="LoRA", frozen_base="fp8")
    train(tmp_path, kernels="fp8 products=emulated", **keys)
    found = table(tmp_path)
    assert found["fp8 products"] == ("emulated", "forced by kernels")
    assert found["experts' fp8 products"] == ("torch", "triton: not on cpu")
    assert found["experts' products with updates"] == ("apart", "triton: not on cpu")
    assert "grouped products" not in found


@pytest.mark.parametrize("ranked", ["gate_proj", "down_proj"])
def test_updates_of_any_of_the_experts_projections_are_in_the_table(
    train: Callable, experts: Path, tmp_path: Path, ranked: str
) -> None:
    train(tmp_path, max_steps=1, model_name_or_path=experts, fine_tuning="LoRA", lora_target_modules=ranked)
    assert table(tmp_path)["experts' products with updates"][0] == "apart"


def test_one_layer_that_attends_in_steps_makes_all_of_them_do_so(train: Callable, tmp_path: Path) -> None:
    """The kernel of a batch is chosen once, for all layers."""
    dense = make_tiny_model(tmp_path / "dense")
    keys = dict(recompute=True, recompute_granularity="core_attn", no_recompute_layers="[0]", compute_type="bf16")
    train(tmp_path / "run", max_steps=1, model_name_or_path=dense, **keys)
    found = table(tmp_path / "run")
    why = "only the inner attention is recomputed in the backward pass"
    assert found["attention"] == found["packed attention"] == ("sdpa", why)


def test_attention_that_a_key_sets_is_the_one_that_is_named(train: Callable, tmp_path: Path) -> None:
    train(tmp_path / "run", max_steps=1, model_name_or_path=make_tiny_model(tmp_path / "dense"), attention="reference")
    assert table(tmp_path / "run")["packed attention"] == ("reference", "attention: reference")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("expert=plain", r"no operation 'expert'.*(\n.*)*did you mean experts=plain\?"),
        ("experts=plain,experts=triton", "two implementations of experts: plain and triton"),
        ("experts=fast", "no implementation 'fast' of experts"),
        ("experts=triton", "experts cannot be forced here: triton: not on cpu"),
        ("attention=flash4", "attention cannot be forced here: flash4: kernels for a card take 16-bit numbers"),
        ("packed attention=cudnn", "packed attention cannot be forced here: cudnn: kernels for a card take 16-bit"),
        ("head=quack", "head cannot be forced here: quack: fewer than 16384 columns"),
        ("AdamW=torch", "AdamW is no choice among kernels: it follows from optim and the device"),
    ],
)
def test_what_cannot_be_forced_is_refused_in_words(
    train: Callable, experts: Path, tmp_path: Path, word: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, max_steps=1, model_name_or_path=experts, kernels=word)


def test_a_mistyped_kernel_on_the_command_line_is_three_lines_and_code_2(
    experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"src": ["a question"], "tgt": ["an answer"]}\n' * 8)
    words = [f"model_name_or_path={experts}", f"train_dataset_path={rows}", f"output_dir={tmp_path / 'out'}"]
    assert main(["train", *words, "device=cpu", "max_steps=1", "kernels=experts=fast"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said[-3:]] == ["error", "where", "fix"]
    assert "no implementation 'fast' of experts: one of triton, plain" in said[-3]
    assert not (tmp_path / "out").exists(), "nothing was spent"
