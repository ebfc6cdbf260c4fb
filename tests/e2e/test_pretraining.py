"""From raw text to a model that has learnt it, through the commands one types; one curve on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

UNIFORM = 7.15  # ln of the vocabulary, 1280: what a model knows before its first step
GOAL, STEPS = 2.2, 60  # measured: 1.5 on held-out documents


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A tiny Llama, a tiny MoE, and the shipped text indexed."""
    folder = tmp_path_factory.mktemp("pretraining")
    for family in ("llama", "ernie4_5_moe"):
        make_tiny_model(folder / family, family=family)
    text = root / "examples/data/pretrain.jsonl"
    words = ["--model_name_or_path", str(folder / "llama"), "--output", str(folder / "tales"), "--num_proc", "1"]
    assert main(["data", "index", str(text), *words]) == 0
    return folder


def keys(workshop: Path, output: Path, **more: Any) -> dict[str, Any]:
    values = dict(
        stage="PT",
        model_name_or_path=workshop / "llama",
        continue_training=False,
        input_dir=workshop / "tales",
        output_dir=output,
        cache_dir=workshop / "cache",
        max_seq_len=32,
        max_steps=4,
        global_batch_size=4,
        learning_rate=3e-3,
        warmup_steps=1,
        lr_scheduler="wsd:2",
        min_lr=1e-4,
        decay_function="1-sqrt",
        compute_type="fp32",
        device="cpu",
        report_to="none",
        logging_steps=1,
        doctor="off",
        drift_check_steps=0,
        straggler_factor=0,
    )
    return {**values, **more}


def run(workshop: str, output: str, more: dict[str, Any]) -> None:
    import erniekit

    erniekit.run("train", **keys(Path(workshop), Path(output), **more))


def records(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def curve(output: Path) -> list[float]:
    return [record["loss"] for record in records(output) if "loss" in record]


def test_a_tiny_llama_from_scratch_learns_the_shipped_text(workshop, tmp_path):
    output = tmp_path / "out"
    words = ["--stage", "PT", "--input_dir", workshop / "tales", "--model_name_or_path", workshop / "llama"]
    words += ["--continue_training", "False", "--output_dir", output, "--max_seq_len", 128, "--batch_size", 4]
    words += ["--max_steps", STEPS, "--learning_rate", 5e-3, "--lr_scheduler", f"wsd:{STEPS - 15}", "--min_lr", 5e-4]
    words += ["--decay_function", "1-sqrt", "--warmup_steps", 5, "--do_eval", "True", "--report_to", "none"]
    assert main(["train", *map(str, words), "--device", "cpu", "--compute_type", "fp32"]) == 0
    losses, told = curve(output), json.loads((output / "eval_results.json").read_text())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, on held-out documents {told['eval_loss']:.3f} (goal {GOAL})")
    assert abs(losses[0] - UNIFORM) < 1.0
    assert told["eval_loss"] < GOAL

    # The same number from the result alone, by `erniekit eval`.
    words = ["--stage", "PT", "--input_dir", workshop / "tales", "--output_dir", output, "--max_seq_len", 128]
    assert main(["eval", *map(str, words), "--batch_size", "4", "--device", "cpu", "--compute_type", "fp32"]) == 0
    again = json.loads((output / "eval_results.json").read_text())
    assert again["eval_loss"] == pytest.approx(told["eval_loss"], abs=1e-6)
    assert again["eval_ppl"] == pytest.approx(told["eval_ppl"], rel=1e-5)
    assert again["eval_tokens"] == told["eval_tokens"]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, dict(sharding="stage2")),
    (4, dict(tensor_parallel_degree=2, sequence_parallel=True)),
    (4, dict(pipeline_parallel_degree=2, sharding="stage1")),
]


@pytest.mark.parametrize(
    ("masks", "layouts"),
    [
        pytest.param(True, LAYOUTS[:2], id="masked"),
        pytest.param(True, LAYOUTS[2:], id="masked, further layouts", marks=pytest.mark.full),
        pytest.param(False, LAYOUTS[:1], id="plain", marks=pytest.mark.full),
    ],
)
def test_one_loss_curve_on_1_2_and_4_ranks(ranks: Ranks, workshop, tmp_path, masks, layouts):
    more = dict(use_global_causal_attn=not masks, do_eval=True, split="995,5")
    ranks.run(1, run, str(workshop), str(tmp_path / "one"), more)
    alone = records(tmp_path / "one")
    for number, (count, layout) in enumerate(layouts):
        output = tmp_path / f"layout{number}"
        ranks.run(count, run, str(workshop), str(output), {**more, **layout})
        # fp32 sums in another order: the promise of every layout, relative to losses of 7
        assert curve(output) == pytest.approx(curve(tmp_path / "one"), rel=1e-6), layout
        evaluated = next(r["eval_loss"] for r in records(output) if "eval_loss" in r)
        # Adam moves a weight whose gradient is mere rounding a whole step either way; one such was seen to do 5e-5.
        assert evaluated == pytest.approx(next(r["eval_loss"] for r in alone if "eval_loss" in r), abs=2e-4)


@pytest.mark.full
def test_masks_between_documents_change_the_loss(workshop, tmp_path):
    run(str(workshop), str(tmp_path / "masked"), {})
    run(str(workshop), str(tmp_path / "plain"), dict(use_global_causal_attn=True))
    run(str(workshop), str(tmp_path / "compat"), dict(compat="erniekit"))
    masked, plain, compat = (curve(tmp_path / name) for name in ("masked", "plain", "compat"))
    assert abs(masked[0] - plain[0]) > 1e-4
    assert compat[0] == pytest.approx(plain[0], abs=1e-6)  # later ones have ERNIEKit's learning rates


def test_a_moe_with_a_further_layer_pretrains_and_tells_its_router_losses(workshop, tmp_path):
    more = dict(model_name_or_path=workshop / "ernie4_5_moe", moe_orthogonal_loss_lambda=1e-3, moe_z_loss_lambda=1e-3)
    run(str(workshop), str(tmp_path), {**more, "model_config": {"multi_token_pred_depth": 1}, "max_steps": 2})
    told = records(tmp_path)[0]
    assert {"router_aux", "router_z", "router_ortho", "mtp_loss", "moe_load", "tokens_per_second"} <= told.keys()
    assert told["mtp_loss"] == pytest.approx(UNIFORM, abs=1.0)


def test_a_stopped_pre_training_goes_on_bit_identical(workshop, tmp_path, weights):
    whole, again = tmp_path / "whole", tmp_path / "again"
    run(str(workshop), str(whole), dict(max_steps=6, save_steps=3))
    again.mkdir()
    shutil.copytree(whole / "checkpoint-3", again / "checkpoint-3")
    run(str(workshop), str(again), dict(max_steps=6, save_steps=3))
    assert curve(again) == curve(whole)[3:]
    assert weights(again / "checkpoint-6") == weights(whole / "checkpoint-6")
    assert any(name.startswith("optimizer") for name in weights(again / "checkpoint-6"))


def test_other_text_is_not_the_same_run(workshop, tmp_path, root):
    run(str(workshop), str(tmp_path / "out"), dict(max_steps=2))
    text = root / "examples/data/pretrain-eval.jsonl"
    with pytest.raises(ConfigError, match="train data"):
        run(str(workshop), str(tmp_path / "out"), dict(max_steps=2, input_dir=None, train_dataset_path=text))


def test_text_that_is_not_indexed_trains_too_and_has_an_evaluation_file(workshop, tmp_path, root, capsys):
    data = root / "examples/data"
    more = dict(
        input_dir=None, train_dataset_path=data / "pretrain.jsonl", eval_dataset_path=data / "pretrain-eval.jsonl"
    )
    run(str(workshop), str(tmp_path), {**more, "do_eval": True, "max_steps": 2, "dataset_num_proc": 1})
    told = capsys.readouterr()
    assert "620 documents" in told.out + told.err  # all of them: the evaluation has a file of its own
    assert "24 documents" in told.out + told.err


def test_a_trained_model_is_trained_on(workshop, tmp_path):
    run(str(workshop), str(tmp_path / "first"), dict(max_steps=4, learning_rate=1e-2))
    more = dict(model_name_or_path=tmp_path / "first", continue_training=True, max_steps=1, learning_rate=0.0)
    run(str(workshop), str(tmp_path / "second"), more)
    assert curve(tmp_path / "second")[0] < curve(tmp_path / "first")[0] - 0.1


def test_ernies_sectioned_recipe_runs_as_its_own_script_is_called(workshop, tmp_path, root):
    """The recorded YAML, a second file that makes it small, and dotted words."""
    small = tmp_path / "small.yaml"
    small.write_text(
        f"""
model_args:
    model_name_or_path: {root}/examples/pre-training/model_configs/ERNIE-4p5-21B-A3B
    tokenizer_name: {workshop}/llama
    max_seq_length: 32
    model_config: {{use_fp8_mlp: false, vocab_size: 1280, hidden_size: 32, intermediate_size: 48, moe_num_experts: 4,
        moe_k: 2, moe_intermediate_size: 16, num_attention_heads: 4, num_key_value_heads: 2}}
trainer_args:
    input_dir: "0.4 {workshop}/tales 0.6 {workshop}/tales"
    bf16: False
    global_batch_size: 4
    sharding_parallel_degree: 1
    expert_parallel_degree: 1
"""
    )
    recorded = root / "tests/data/recipes/pretrain_21b_sectioned.yaml"
    words = ["--configs", str(recorded), str(small), "--kwargs", "trainer_args.max_steps=2"]
    words += ["model_args.model_config.num_hidden_layers=2", f"model_args.output_dir={tmp_path / 'out'}", "device=cpu"]
    assert main(["train", *words]) == 0
    assert len(curve(tmp_path / "out")) == 2
    assert records(tmp_path / "out")[0]["mtp_loss"] > 0  # multi_token_pred_depth: 1
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (saved["num_hidden_layers"], saved["hidden_size"], saved["num_nextn_predict_layers"]) == (2, 32, 1)
