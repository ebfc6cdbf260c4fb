"""Preference runs as a user starts them: every kind of reference, resuming, evaluation, and what they leave behind."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import erniekit
from erniekit.config.metrics import metrics_of
from erniekit.data import sealed
from erniekit.errors import ConfigError, DataError
from erniekit.files import OwnedFiles
from erniekit.files.walk import foreign_files
from erniekit.loss_table import PREFERENCE_LOSSES
from erniekit.losses.dpo import DpoSettings, metric_names
from erniekit.recipes.dpo import TRAIN_ARGS
from support.ranks import Ranks
from support.recorded import tiny_folder, whole_pairs

LN2 = math.log(2)
KINDS = [("Full", "live"), ("Full", "cached"), ("LoRA", "live"), ("LoRA", "cached")]


@pytest.fixture(scope="module")
def pairs(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded pairs that are whole."""
    return whole_pairs(paddle, tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture
def prefer(train: Callable, pairs: Path) -> Callable:
    """prefer(output_dir, key=value, ...) -> RunResult: a small DPO run in fp32, without the checks before it."""

    def go(output: Path, **keys: object) -> Any:
        small = dict(max_seq_len=160, max_steps=4, gradient_accumulation_steps=2, learning_rate=1e-3, doctor="off")
        return train(output, **{"stage": "DPO", "train_dataset_path": pairs, **small, **keys})

    return go


def logged(folder: Path, name: str = "loss") -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r[name] for r in map(json.loads, lines) if name in r]


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_the_first_loss_is_ln_2_and_kept_references_give_the_live_curve(
    tuning: str, prefer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for reference in ("live", "cached"):
        prefer(tmp_path / reference, fine_tuning=tuning, reference_logps=reference)
    live, kept = (logged(tmp_path / reference) for reference in ("live", "cached"))
    assert live[0] == pytest.approx(LN2, abs=1e-6)
    assert min(live) < LN2 - 1e-3, "it learns"
    assert kept == pytest.approx(live, abs=1e-6)  # sums over other rows of a batch
    said = capsys.readouterr().out
    assert {"Full": "a second copy of the model", "LoRA": "the model without its adapters"}[tuning] in said
    assert "kept log-probabilities equal the live ones" in said


def test_the_checks_before_training_do_not_change_a_preference_run(
    prefer: Callable, weights: Callable, tmp_path: Path
) -> None:
    for doctor in ("on", "off"):
        prefer(tmp_path / doctor, doctor=doctor, max_steps=2, fine_tuning="LoRA")
    assert weights(tmp_path / "on") == weights(tmp_path / "off")


@pytest.mark.parametrize(
    ("tuning", "reference"),
    [
        ("Full", "cached"),
        ("LoRA", "live"),
        *(pytest.param(*p, marks=pytest.mark.full) for p in (("Full", "live"), ("LoRA", "cached"))),
    ],
)
def test_a_preference_run_resumes_bit_for_bit(
    tuning: str, reference: str, prefer: Callable, weights: Callable, tmp_path: Path
) -> None:
    keys = dict(fine_tuning=tuning, reference_logps=reference, save_steps=2)
    prefer(tmp_path / "run", **keys)
    want, curve = weights(tmp_path / "run" / "checkpoint-4"), logged(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    prefer(tmp_path / "run", **keys)
    assert weights(tmp_path / "run" / "checkpoint-4") == want
    assert logged(tmp_path / "run") == curve
    assert any(name.startswith("optimizer") for name in want)


def change_weights(model: Path) -> None:
    """Other numbers in the same files; neither their size nor their time tells."""
    for file in model.glob("*.safetensors"):
        before, data = file.stat(), bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        values = np.frombuffer(data, np.float32, offset=start)
        file.write_bytes(bytes(data[:start]) + (values * np.float32(1.5)).tobytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size


def test_kept_references_of_another_model_under_the_same_name_are_not_used(
    prefer: Callable, paddle: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = tiny_folder(paddle, tmp_path / "model", "dense_new")
    keys = dict(model_name_or_path=model, reference_logps="cached", max_steps=1)
    prefer(tmp_path / "first", **keys)
    change_weights(model)
    capsys.readouterr()
    prefer(tmp_path / "second", **keys)
    assert "computed once" in capsys.readouterr().out
    assert logged(tmp_path / "second")[0] == pytest.approx(LN2, abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dict(compute_type="bf16"), dict(compute_type="bf16", use_fp8=True)),
        (dict(compute_type="fp8"), dict(compute_type="fp8", seed=7)),
    ],
)
def test_kept_references_of_other_products_are_not_started_from(
    first: dict[str, Any], second: dict[str, Any], prefer: Callable, tmp_path: Path
) -> None:
    """The scales of compute_type fp8 come from the run's first tokens, which another seed makes others."""
    keys = dict(reference_logps="cached", max_steps=1, cache_dir=tmp_path / "cache")
    for name, products in (("first", first), ("second", second)):
        prefer(tmp_path / name, **keys, **products)
        assert logged(tmp_path / name) == [pytest.approx(LN2, abs=1e-6)]
    tables = [np.load(file) for file in (tmp_path / "cache" / "reference").glob("*/log_probs.npy")]
    assert len(tables) == 2
    assert not np.array_equal(*tables)
    prefer(tmp_path / "again", **keys, **second)
    assert len(list((tmp_path / "cache" / "reference").iterdir())) == 2, "found again"


def test_kept_references_that_the_model_does_not_give_are_refused(prefer: Callable, tmp_path: Path) -> None:
    keys = dict(reference_logps="cached", max_steps=1, cache_dir=tmp_path / "cache")
    prefer(tmp_path / "first", **keys)
    (kept,) = (tmp_path / "cache" / "reference").iterdir()
    np.save(kept / "log_probs.npy", np.load(kept / "log_probs.npy") + 1)
    (kept / sealed.SEAL).unlink()
    sealed.seal(kept)  # as if another model's had come to the same name
    with pytest.raises(DataError) as caught:
        prefer(tmp_path / "second", **keys)
    assert "reference_logps: cached" in caught.value.where
    assert "delete" in caught.value.fix


@pytest.mark.full
def test_damaged_kept_references_are_computed_again(
    prefer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = dict(reference_logps="cached", max_steps=1, cache_dir=tmp_path / "cache")
    prefer(tmp_path / "first", **keys)
    (kept,) = (tmp_path / "cache" / "reference").glob("*/log_probs.npy")
    whole = kept.read_bytes()
    for damaged in (whole, whole[:-3], b"", whole[:-8] + bytes(8)):
        kept.write_bytes(damaged)
        capsys.readouterr()
        prefer(tmp_path / f"with {sum(damaged)}", **keys)
        assert ("computed once" in capsys.readouterr().out) is (damaged != whole)
        assert kept.read_bytes() == whole


def test_an_updated_reference_starts_anew_from_the_policy(prefer: Callable, tmp_path: Path) -> None:
    prefer(tmp_path / "run", ref_model_update_steps=2)
    losses = logged(tmp_path / "run")
    assert losses[0] == losses[2] == pytest.approx(LN2, abs=1e-6)
    assert min(abs(losses[1] - LN2), abs(losses[3] - LN2)) > 1e-3, "which the reference of a step ago is not"


def test_a_resumed_run_has_the_reference_it_had(
    prefer: Callable, weights: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Stopped at step 3, its reference is the policy of step 2: from the checkpoint, or the user is told."""
    keys = dict(ref_model_update_steps=2, save_steps=1)
    prefer(tmp_path / "run", **keys)
    want = weights(tmp_path / "run" / "checkpoint-4")
    for gone, exact in ((["checkpoint-4"], True), (["checkpoint-4", "checkpoint-2"], False)):
        for name in gone:
            shutil.rmtree(tmp_path / "run" / name)
        capsys.readouterr()
        prefer(tmp_path / "run", **keys)
        said = capsys.readouterr()
        assert (weights(tmp_path / "run" / "checkpoint-4") == want) is exact
        assert ("the policy of step 2, from checkpoint-2" in said.out) is exact
        assert ("checkpoint-2 is gone" in said.err) is not exact


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_eval_measures_a_result_against_what_it_was_trained_from(
    tuning: str, prefer: Callable, tiny_model: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    result = prefer(run, fine_tuning=tuning, eval_dataset_path=pairs, evaluation_strategy="epoch")
    keys = dict(stage="DPO", eval_dataset_path=pairs, max_seq_len=160, compute_type="fp32", device="cpu")
    capsys.readouterr()
    again = erniekit.run("eval", model_name_or_path=tiny_model, output_dir=run, **keys)
    assert f"of {again.metrics['eval_pairs']:.0f} pairs preferred right" in capsys.readouterr().out
    rates = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    names = [name for name in result.metrics if name.startswith("eval_") and name not in rates]
    assert {"eval_loss", "eval_rewards/accuracies", "eval_rewards/margins", "eval_sigmoid_loss"} <= set(names)
    for name in names:
        assert again.metrics[name] == pytest.approx(result.metrics[name], abs=1e-4), name
    assert again.metrics["eval_loss"] < LN2 - 1e-3
    told = json.loads((run / "eval_results.json").read_text())
    assert told["eval_rewards/accuracies"] == again.metrics["eval_rewards/accuracies"]


def test_eval_of_a_model_against_itself_says_so(
    train: Callable, tiny_model: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = dict(stage="DPO", eval_dataset_path=pairs, max_seq_len=160, compute_type="fp32", device="cpu")
    metrics = erniekit.run("eval", model_name_or_path=tiny_model, output_dir=tmp_path / "out", **keys).metrics
    assert metrics["eval_loss"] == pytest.approx(LN2, abs=1e-6)
    assert metrics["eval_pairs"] == 8
    assert "the model itself, so all rewards are 0" in capsys.readouterr().out
    free = erniekit.run(
        "eval", model_name_or_path=tiny_model, output_dir=tmp_path / "free", loss_type="simpo", **keys
    ).metrics
    assert free["eval_simpo_loss"] == pytest.approx(free["eval_loss"], abs=1e-6)
    assert "reference" not in capsys.readouterr().out


def test_what_a_preference_run_leaves_behind(prefer: Callable, pairs: Path, tmp_path: Path) -> None:
    prefer(tmp_path, fine_tuning="LoRA", eval_dataset_path=pairs, evaluation_strategy="epoch", max_steps=2)
    everything = json.loads((tmp_path / "all_results.json").read_text())
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (last,) = [record for record in last if record["global_step"] == 2 and "loss" in record]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "sigmoid_loss"):
        assert everything[name] == last[name]
        assert f"eval_{name}" in everything
    assert "ppl" not in last
    assert "eval_ppl" not in everything
    told = json.loads((tmp_path / TRAIN_ARGS).read_text())
    assert (told["max_steps"], told["train_samples"], told["gradient_accumulation_steps"]) == (2, 8, 2)
    assert OwnedFiles(tmp_path).is_ours(TRAIN_ARGS)
    assert not list(foreign_files(tmp_path))
    assert "Reward margin" in (tmp_path / "report.html").read_text()


def test_a_file_of_the_user_s_is_not_replaced_by_a_run_s_size(
    prefer: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine.json"
    prefer(run, max_steps=1)
    args = run / TRAIN_ARGS
    written = args.read_bytes()
    with pytest.raises(ConfigError):
        prefer(run, max_steps=2, learning_rate=1e-4)
    assert args.read_bytes() == written, "a run that is refused writes nothing"
    args.unlink()
    mine.write_text("mine")
    for put in (lambda: args.write_text("mine"), lambda: (args.unlink(), args.symlink_to(mine))):
        put()
        capsys.readouterr()
        prefer(run, max_steps=1)
        assert f"{TRAIN_ARGS} is yours and stays" in capsys.readouterr().out
        assert args.read_text() == mine.read_text() == "mine"
    assert args.is_symlink()


def test_a_benchmark_prints_its_rate_and_saves_nothing_on_the_way(
    prefer: Callable, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    keys = dict(save_steps=1, eval_dataset_path=pairs, evaluation_strategy="steps", eval_steps=1)
    result = prefer(tmp_path, dpo_benchmark=True, max_steps=3, **keys)
    assert "effective tokens/s" in capsys.readouterr().out
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert "eval_loss" not in result.metrics


def test_a_negative_accumulation_is_chosen_by_the_size_of_the_data(prefer: Callable, tmp_path: Path) -> None:
    prefer(tmp_path, gradient_accumulation_steps=-1, max_steps=1, fine_tuning="LoRA")
    told = json.loads((tmp_path / TRAIN_ARGS).read_text())
    assert told["gradient_accumulation_steps"] > 1, "eight pairs a step, two or three in a pack"
    assert told["global_batch_size"] == told["gradient_accumulation_steps"]


@pytest.mark.parametrize("tuning", ["Full", "LoRA"])
def test_a_model_with_experts_learns_a_preference(tuning: str, prefer: Callable, paddle: Path, tmp_path: Path) -> None:
    model = tiny_folder(paddle, tmp_path / "model", "moe_new")
    prefer(tmp_path / "run", model_name_or_path=model, fine_tuning=tuning, moe_aux_loss_lambda=0.01)
    losses = logged(tmp_path / "run")
    assert losses[0] == pytest.approx(LN2, abs=1e-6)
    assert min(losses) < LN2 - 1e-3
    assert len(logged(tmp_path / "run", "router_aux")) == 4, "router losses are told beside the rewards"


def whole_run(keys: dict[str, Any]) -> dict[str, float]:
    return erniekit.run("train", **keys).metrics


@pytest.mark.full
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("tuning", "reference"), [("Full", "cached"), KINDS[0], KINDS[2]])
def test_two_ranks_with_sharded_weights_give_the_run_of_one(
    tuning: str, reference: str, ranks: Ranks, prefer: Callable, tiny_model: Path, pairs: Path, tmp_path: Path
) -> None:
    """The evaluation has five packs: one rank has nothing to do in its last call, and must not wait for the other."""
    keys = dict(
        fine_tuning=tuning, reference_logps=reference, eval_dataset_path=pairs, evaluation_strategy="epoch", max_steps=2
    )
    one = prefer(tmp_path / "one", **keys).metrics
    keys |= dict(
        stage="DPO", model_name_or_path=tiny_model, train_dataset_path=pairs, output_dir=tmp_path / "two",
        max_seq_len=160, compute_type="fp32", learning_rate=1e-3, gradient_accumulation_steps=1, sharding="stage3",
        report_to="none",
        device="cpu", doctor="off", cache_dir=tmp_path / "their_cache",
    )  # fmt: skip
    for two in ranks.run(2, whole_run, keys):
        for name in ("train_loss", "eval_loss", "rewards/margins", "eval_rewards/margins", "eval_pairs"):
            assert two[name] == pytest.approx(one[name], abs=1e-5), name
    assert logged(tmp_path / "two") == pytest.approx(logged(tmp_path / "one"), abs=1e-6)


@pytest.mark.xdist_group("ranks")
def test_kept_references_of_another_layout_are_not_started_from(
    ranks: Ranks, prefer: Callable, tiny_model: Path, pairs: Path, tmp_path: Path
) -> None:
    """In bf16 the sums of tensor-parallel ranks are rounded otherwise, more than the first loss may be off."""
    keys = dict(fine_tuning="Full", reference_logps="cached", compute_type="bf16", max_steps=1)
    keys |= dict(cache_dir=tmp_path / "cache")
    prefer(tmp_path / "one", **keys)
    keys |= dict(
        stage="DPO", model_name_or_path=tiny_model, train_dataset_path=pairs, output_dir=tmp_path / "two",
        max_seq_len=160, learning_rate=1e-3, gradient_accumulation_steps=2, tensor_parallel_degree=2, report_to="none",
        device="cpu", doctor="off",
    )  # fmt: skip
    ranks.run(2, whole_run, keys)
    assert logged(tmp_path / "one") == logged(tmp_path / "two") == [pytest.approx(LN2, abs=1e-6)]
    tables = [np.load(file) for file in (tmp_path / "cache" / "reference").glob("*/log_probs.npy")]
    assert len(tables) == 2
    assert not np.array_equal(*tables), "the layouts round otherwise"


@pytest.mark.full
@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_every_loss_type_trains(kind: str, prefer: Callable, tmp_path: Path) -> None:
    """All pairs in every step, so that the loss of the next one must be lower."""
    keys = dict(packing=False, gradient_accumulation_steps=8, learning_rate=3e-4, lr_scheduler_type="constant")
    result = prefer(tmp_path, loss_type=kind, fine_tuning="LoRA", max_steps=3, **keys)
    losses = logged(tmp_path)
    assert losses[2] < losses[1] < losses[0]
    name = "or_loss" if kind == "orpo" else f"{kind}_loss"
    assert math.isfinite(result.metrics[name])


def test_the_best_model_by_the_preference_loss_is_the_one_that_lost_least(
    prefer: Callable, pairs: Path, tmp_path: Path
) -> None:
    """A rate that diverges after a few steps, so that neither the first nor the last is best."""
    keys = dict(
        eval_dataset_path=pairs, evaluation_strategy="steps", eval_steps=1, max_steps=6, learning_rate=5e-3,
        load_best_model_at_end=True, metric_for_best_model="sigmoid_loss", save_steps=10,
    )  # fmt: skip
    prefer(tmp_path, **keys)
    losses = logged(tmp_path, "eval_sigmoid_loss")
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert len(losses) == 6
    assert max(losses) > min(losses)
    assert state["best_metric"] == pytest.approx(min(losses))
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{1 + losses.index(min(losses))}")
    told = {n.removeprefix("eval_") for n in map_of_last(tmp_path) if n.startswith("eval_")}
    about_the_run = {"pairs", "runtime", "samples_per_second", "steps_per_second"}
    assert told - about_the_run == set(metrics_of("DPO", "sigmoid")), "every metric that is told can be chosen"


def map_of_last(folder: Path) -> dict[str, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [r for r in records if "eval_loss" in r][-1]


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_what_can_be_chosen_as_best_is_what_a_loss_type_tells(kind: str) -> None:
    assert set(metrics_of("DPO", kind)) == {"loss", *metric_names(DpoSettings(loss_type=kind))}
