"""What a run decides before anything is built, and how it is recorded."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import cpu
from erniekit.errors import CheckpointError, ConfigError
from erniekit.lora.settings import LoRASettings
from erniekit.recipes import run_plan, stage_of
from erniekit.recipes.build import build


@pytest.mark.parametrize("word", ["device=auto", "device=cpu"])
def test_a_run_that_finds_itself_on_a_cpu_records_fp32_with_its_reason(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    opened = run_plan.open_device(load([word]))
    cfg, dtype = opened.config, opened.dtype
    assert dtype == torch.float32
    assert {key: (cfg[key], cfg.origin(key)) for key in ("compute_type", "bf16")} == {
        "compute_type": ("fp32", "derived"),
        "bf16": (False, "derived"),
    }
    (note,) = [str(n) for n in cfg.notes if n.key == "compute_type"]
    assert note == "compute_type: bf16 -> fp32 (bf16 is slow on a CPU; write compute_type: bf16 to have it)"


@pytest.mark.parametrize("words", [["compute_type=bf16"], ["bf16=True"], ["--bf16"], ["--bf16", "True"]])
def test_bf16_that_was_asked_for_stays_on_a_cpu_under_either_name(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    opened = run_plan.open_device(load(words))
    cfg, dtype = opened.config, opened.dtype
    assert dtype == torch.bfloat16
    assert (cfg.precision.compute_type, cfg.precision.bf16) == ("bf16", True)
    assert "compute_type" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["", "compute_type=fp8"])
def test_masters_of_weights_that_are_fp32_on_a_cpu_are_told_of(kind: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    words = ["master_weights=exact16", *([kind] if kind else [])]
    assert run_plan.open_device(load(words)).config.optim.master_weights == "fp32"
    told = "master_weights: exact16 -> fp32 (weights are computed in fp32: they are their own masters)"
    assert told in capsys.readouterr().out


def test_ranks_that_share_a_cpu_are_told_that_the_key_does_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run_plan, "pick", lambda *asked: cpu.make())
    memory = run_plan.open_device(load(["ranks_per_device=4"])).device.total_memory
    told = "note     ranks_per_device: 4 (without effect: on a CPU nproc_per_node sets it)"
    assert told in capsys.readouterr().out.splitlines()
    assert memory == run_plan.open_device(load([])).device.total_memory
    assert "ranks_per_device" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


def planned(folder: Path, *words: str) -> run_plan.RunPlan:
    words = ("device=cpu", "compute_type=fp32", f"model_name_or_path={folder}", "train_dataset_path=none", *words)
    return run_plan.plan_run(load(list(words)), one_process=True)


def test_a_plan_holds_every_decision_and_cannot_be_changed(moe: Path) -> None:
    plan = planned(moe, "fine_tuning=LoRA", "lora_rank=4", "num_nextn_predict_layers=1", "expert_max_capacity=7")
    assert (plan.lora, plan.mtp_tokens) == (LoRASettings.resolve(4), 1)
    assert plan.folder.config.moe is not None
    assert plan.folder.config.moe.most == 7
    assert plan.config.model.compile is None, "the data has not been read"
    assert plan.at_full_length().config.model.compile is False, "speed is decided too"
    assert (plan.dtype, plan.stored_dtype, plan.graphed) == (torch.float32, torch.float32, None)
    for part, name in ((plan, "config"), (plan.config, "model"), (plan.config.model, "compile"), (plan.lora, "rank")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_a_mix_on_a_model_without_experts_is_what_is_left_of_it(moe: Path, tmp_path: Path) -> None:
    words = ("fine_tuning=LoRA", "frozen_base=wint4/8")
    dense = make_tiny_model(tmp_path / "dense")
    told = "frozen_base: wint4/8 is int8 here: the model has no experts"
    assert told in planned(dense, *words).model_notes
    assert told not in planned(moe, *words).model_notes


def test_products_in_fp8_are_spoken_of_only_where_experts_have_weights_for_them(moe: Path, tmp_path: Path) -> None:
    words = ("fine_tuning=LoRA", "frozen_base=wint4/8")
    dense = make_tiny_model(tmp_path / "dense")

    def said(plan: run_plan.RunPlan) -> list[str]:
        return [str(note) for note in plan.config.notes if note.key == "frozen_products"]

    assert "int4 weights are exact in fp8" in said(planned(moe, *words))[0]
    assert said(planned(dense, *words)) == []
    asked = planned(dense, *words, "frozen_products=fp8")
    assert asked.config.lora.frozen_products == "bf16"
    assert said(asked) == ["frozen_products: fp8 -> bf16 (only experts' weights are exact in fp8; here are none)"]


def test_kept_references_are_live_where_a_pair_s_rounding_depends_on_its_place(moe: Path) -> None:
    words = ("stage=DPO", "fine_tuning=Full", "reference_logps=cached")
    assert planned(moe, *words, "context_parallel_degree=2").config.dpo.reference_logps == "cached"
    assert planned(moe, *words, "compute_type=bf16").config.dpo.reference_logps == "cached"
    cut = planned(moe, *words, "compute_type=bf16", "context_parallel_degree=2").config
    assert cut.dpo.reference_logps == "live"
    (note,) = (note for note in cut.notes if note.key == "reference_logps")
    assert "rounded by where its row is cut" in note.reason
    assert not note.quiet


def test_what_a_run_builds_is_its_plan(moe: Path) -> None:
    plan = planned(moe, "fine_tuning=LoRA", "num_nextn_predict_layers=1")
    built = build(plan, stage_of(plan.config), "a digest")
    assert built.plan is plan
    assert (built.lora, built.folder, built.world, built.base) == (plan.lora, plan.folder, plan.world, "a digest")
    assert (built.mtp_tokens, built.engine.parts[0].config) == (1, plan.folder.config)
    with pytest.raises(FrozenInstanceError):
        built.base = "another"  # type: ignore[misc]


def test_nothing_is_refused_after_the_plan_that_the_plan_could_refuse(moe: Path) -> None:
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        planned(moe, "num_nextn_predict_layers=3")
    with pytest.raises(ConfigError, match="preference training scores answers"):
        planned(moe, "stage=DPO", "num_nextn_predict_layers=1")


def test_only_the_plan_and_those_it_asks_derive_values_of_a_config() -> None:
    """A config that is rewritten later is another than the one that was printed and stored."""
    makers = {"run_plan.py", "speed_decisions.py", "evaluate.py"}  # the last: the stage, once the model is known
    found = {file.name for file in Path(run_plan.__file__).parent.glob("*.py") if ".derive(" in file.read_text()}
    assert found == makers


def test_an_adapter_in_the_place_of_a_model_is_named_with_how_to_go_on_from_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base-model", "r": 8}')
    with pytest.raises(CheckpointError, match="holds an adapter, where a whole model is needed") as told:
        run_plan.open_model(load([f"model_name_or_path={tmp_path}"]))
    assert f"lora_path={tmp_path} model_name_or_path=base-model fine_tuning=LoRA" in told.value.fix
