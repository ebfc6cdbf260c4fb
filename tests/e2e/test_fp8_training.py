"""FP8 training in whole runs: the same in every layout, resumed exactly, with adapters, and in blocks."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from erniekit.demo.tiny import make_tiny_model
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


def train(model: str, rows: str, output: str, keys: dict[str, Any]) -> tuple[int, str]:
    """On a rank."""
    from erniekit.cli.main import main

    values = dict(
        model_name_or_path=model, train_dataset_path=rows, output_dir=output, stage="SFT", fine_tuning="Full",
        learning_rate=2e-3, compute_type="fp8", max_seq_len=96, max_steps=4, save_steps=2, save_total_limit=-1,
        gradient_accumulation_steps=2, report_to="none", device="cpu", doctor="off", apply_online_actscale_step=2,
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["train", *(f"{key}={value}" for key, value in {**values, **keys}.items())])
    return code, said.getvalue()


def run(ranks: Ranks, count: int, model: Path, rows: Path, output: Path, **keys: Any) -> str:
    for code, said in ranks.run(count, train, str(model), str(rows), str(output), keys):
        assert code == 0, said
    return said


def curve(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def scales(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "fp8_scales.json").read_text())


@pytest.fixture(scope="module")
def alone(ranks: Ranks, moe: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, undisturbed."""
    output = tmp_path_factory.mktemp("alone") / "out"
    run(ranks, 1, moe, rows, output)
    return output


DATA = dict(gradient_accumulation_steps=1)  # as many sequences a step
LAYOUTS = {
    "tp2": dict(tensor_parallel_degree=2),
    "experts2": dict(sharding="stage1", sharding_parallel_degree=2, moe_group="data", **DATA),
    "tp2 with sequences cut, over experts": dict(tensor_parallel_degree=2, sequence_parallel=True, moe_group="mp"),
    "dp2": dict(data_parallel_degree=2, **DATA),
    "stage3": dict(sharding="stage3", sharding_parallel_degree=2, **DATA),
    "pp2": dict(pipeline_parallel_degree=2),
    "cp2": dict(context_parallel_degree=2),
}
OFTEN = ("tp2", "experts2", "pp2")


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n not in OFTEN)]
)
def test_it_learns_the_same_in_every_layout(
    name: str, moe: Path, rows: Path, alone: Path, tmp_path: Path, ranks: Ranks
):
    run(ranks, 2, moe, rows, tmp_path / "out", **LAYOUTS[name])
    one, two = curve(alone), curve(tmp_path / "out")
    assert len(one) == 4
    # Sums in another order move some numbers to the next one of fp8, and each step learns from that: by the fourth
    # losses were up to 0.2 % apart, more or less by the kind of CPU.
    assert two[0] == pytest.approx(one[0], abs=2e-4)
    assert two == pytest.approx(one, rel=4e-3)
    want, got = (scales(path / "checkpoint-4")["layers"] for path in (alone, tmp_path / "out"))
    assert got.keys() == want.keys()
    assert len(want) == 10  # of each layer qkv and out, gate_up and down; and one has shared experts beside its experts
    for layer, scale in want.items():
        assert got[layer]["input_scale"] == pytest.approx(scale["input_scale"], rel=0.03), layer


def test_a_resumed_run_is_the_undisturbed_one_across_the_switch_to_the_mean(
    moe: Path, rows: Path, alone: Path, tmp_path: Path, ranks: Ranks
):
    """Saved within the online steps and resumed behind them: the same losses and the same files."""
    said = run(ranks, 1, moe, rows, tmp_path / "out", resume_from_checkpoint=alone / "checkpoint-2")
    assert "reproduced bit for bit" in said
    assert curve(tmp_path / "out")[-2:] == curve(alone)[-2:]
    for name in ("fp8_scales.json", "model.safetensors"):
        files = [(path / "checkpoint-4" / name).read_bytes() for path in (alone, tmp_path / "out")]
        assert files[0] == files[1], name
    first, last = scales(alone / "checkpoint-2"), scales(alone / "checkpoint-4")
    assert (first["steps"], last["steps"]) == (2, 4)
    for layer in last["layers"].values():
        assert layer["mean"] == layer["input_scale"], "behind the switch the mean is used"
    assert any(layer["mean"] != layer["input_scale"] for layer in first["layers"].values())


def test_new_scales_are_taken_where_that_is_asked_for(moe: Path, rows: Path, alone: Path, tmp_path: Path, ranks: Ranks):
    more = dict(fp8_force_clear_state=True, enable_fp8_quantize_analysis=True, override_resume=True)
    run(ranks, 1, moe, rows, tmp_path / "out", resume_from_checkpoint=alone / "checkpoint-2", **more)
    assert scales(tmp_path / "out" / "checkpoint-4")["steps"] == 2, "counted from the resume on"
    told = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["fp8_worst"] > 0 for record in told if "loss" in record)


VARIANTS = {
    "gradients in fp8": dict(quant_input_grad=True, quant_weight_grad=True),
    "rotated": dict(apply_hadamard=True),
    "layers computed again": dict(recompute=True),
    "blocks": dict(compute_type="fp32", use_fp8=True),
    "adapters": dict(fine_tuning="LoRA", lora_rank=4, learning_rate=1e-2, max_steps=8, save_steps=4),
    "as ERNIEKit": dict(compat="erniekit"),
}


FEW = ("layers computed again", "blocks", "adapters")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in VARIANTS])
def test_every_way_of_rounding_learns_and_differs(
    name: str, moe: Path, rows: Path, alone: Path, tmp_path: Path, ranks: Ranks
):
    run(ranks, 1, moe, rows, tmp_path / "out", **VARIANTS[name])
    losses, usual = curve(tmp_path / "out"), curve(alone)
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(usual[0], rel=0.02)
    if name == "layers computed again":
        assert losses == usual, "a layer that is computed again rounds as it did"
    else:
        assert losses != usual
    saved = tmp_path / "out" / "checkpoint-4" / "fp8_scales.json"
    assert saved.is_file() == (name != "blocks")
    if name in ("rotated", "as ERNIEKit"):
        layers = json.loads(saved.read_text())
        assert layers["highest"] == (488.0 if name == "as ERNIEKit" else 448.0)
        assert {n for n, layer in layers["layers"].items() if layer["block"] == 0} == {
            "layers.1.mlp.experts.gate_up", "layers.1.mlp.experts.down"
        }  # fmt: skip
