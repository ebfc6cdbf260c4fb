"""Several ranks on one NVIDIA card, over NCCL: compiled as one rank is, with its losses and its kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases.ranks import run_once, run_ranks
from device_cases.recipes import model_folder, rows
from device_cases.slices import profiled_slice

from erniekit.bench.profile import kind_of
from erniekit.bench.workloads import ERNIE_21B
from erniekit.models.released import ERNIE_03B

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

# One dense layer and one with experts: kernels are counted, not steps a second, and a layout takes half a minute.
CUT_DOWN = {**ERNIE_21B, "num_hidden_layers": 2, "vocab_size": 32768, "moe_layer_end_index": 1, "moe_num_experts": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": dict(data_parallel_degree=2),
    "ep2": dict(moe_group="ep"),
    "tp2": dict(
        tensor_parallel_degree=2, sequence_parallel=True, moe_group="mp"
    ),  # as every recipe with experts has it
    "fsdp2": dict(sharding="stage3", sharding_parallel_degree=2),
    "fsdp2 wint4/8": dict(sharding="stage3", sharding_parallel_degree=2, frozen_base="wint4/8"),
    "pp2": dict(pipeline_parallel_degree=2),
}
# bf16: products cut in two add up in another order, and a token may take another expert for it.
LOSS = 0.02
SLOWER = 0.05  # kernel time of all ranks together, against one rank's for the same tokens


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return dict(
        stage="SFT", fine_tuning="LoRA", lora_rank=32, compute_type="bf16", packing=True, max_seq_len=16384, seed=11,
        model_name_or_path=str(model_folder(folder, "model", CUT_DOWN)), train_dataset_path=str(rows(folder)[0]),
        train_dataset_type="erniekit", train_dataset_prob="1.0", continue_training=False, do_train=True, max_steps=4,
        batch_size=1, learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        save_strategy="no", evaluation_strategy="no", doctor="off", probe_tokens=0, verify="size",
        cache_dir=str(folder / "cache"), cuda_graph=False,
    )  # fmt: skip


Alone = Callable[..., tuple[list[dict], list]]


@pytest.fixture
def alone(keys: dict[str, Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """One rank's steps and kernels, with these keys more; kept in pytest's cache where there is one."""
    cache = getattr(request.config, "cache", None)
    kept = tmp_path_factory.getbasetemp() if cache is None else cache.mkdir("one-rank")

    def run(**more: Any) -> tuple[list[dict], list]:
        steps, kernels, said = run_once(kept, 1, gradient_accumulation_steps=4, **{**keys, **more})
        assert "compile: None -> True" in said
        return steps, kernels[0]

    return run


def hand_written(kernels: list) -> set[str]:
    """Kernels of ours in a layer: names that compilers number are left out, and the update's (ranks form their common
    norm otherwise)."""
    names = {name.split("|")[0] for name, _ in kernels}
    return {name for name in names if re.fullmatch(r"_?[a-z][a-z_]*", name) and kind_of(name) != "optimizer"}


def trained_as_one(name: str, layout: dict[str, Any], alone: Alone, keys: dict[str, Any], folder: Path) -> None:
    """Losses and kernels of ours are one rank's."""
    shares_data = not {"tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"} & set(layout)
    base = {key: layout[key] for key in ("frozen_base",) if key in layout}
    one_steps, one_kernels = alone(**base)
    count = 2 if shares_data else 4
    steps, kernels, said = run_ranks(folder / "run", 2, **keys, gradient_accumulation_steps=count, **layout)
    assert "compile: None -> True" in said
    got, want = [s["loss"] for s in steps], [s["loss"] for s in one_steps]
    assert got == pytest.approx(want, abs=LOSS), (got, want)
    missing = hand_written(one_kernels) - set().union(*(hand_written(rank) for rank in kernels))
    assert not missing, f"one rank runs these, {name} does not: {missing}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_are_compiled_and_train_as_one_rank_does(
    name: str, alone: Alone, keys: dict[str, Any], tmp_path: Path
) -> None:
    trained_as_one(name, LAYOUTS[name], alone, keys, tmp_path)


def test_ranks_that_each_have_a_part_of_every_expert_train_as_one_rank_does(
    alone: Alone, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Each of them puts the rows of all tokens in order: they take longer than one rank does."""
    trained_as_one("tp2", dict(tensor_parallel_degree=2, sequence_parallel=True), alone, keys, tmp_path)


def test_ranks_of_a_sequence_run_the_kernels_of_one_rank(alone: Alone, keys: dict[str, Any], tmp_path: Path) -> None:
    trained_as_one("cp2", dict(context_parallel_degree=2), alone, keys, tmp_path)
    table = json.loads((tmp_path / "run" / "out" / "run.json").read_text())["kernels"]
    by = {row["operation"]: row["implementation"] for row in table}
    assert by["packed attention"] in ("flash4", "cudnn", "flash")


# --- calls between ranks beside the computation

DENSE = {**ERNIE_03B, "num_hidden_layers": 6, "vocab_size": 32768}
BESIDE = 0.2  # of the shorter of the two: sockets are slower than the links of a machine with several cards


@pytest.mark.parametrize("name", ["dp2", "fsdp2"])
def test_gradients_and_weights_travel_while_kernels_compute(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Full fine-tuning: data-parallel ranks add up gradients from the last layers on, sharded ones fetch the weights of
    layers to come."""
    dense = dict(model_name_or_path=str(model_folder(tmp_path, "dense", DENSE)), fine_tuning="Full", compile=False)
    run_ranks(tmp_path / "run", 2, **{**keys, **dense, **LAYOUTS[name]}, gradient_accumulation_steps=1)
    for rank in range(2):
        seen = json.loads((tmp_path / "run" / f"kernels-{rank}.overlap").read_text())
        assert seen["both_ms"] > BESIDE * min(seen["communication_ms"], seen["computation_ms"]), seen


# --- kernel time, each rank alone on the card

MICRO_BATCHES = 2
# Rows are put together for the ranks they travel to, and put back: communication, as what carries them.
PACKING = ("vectorized_gather_kernel", "_sum_choices")


def computing(profile: dict[str, Any]) -> float:
    """Milliseconds of a step's kernels, without copies: weights that come from other ranks are copied."""
    return sum(ms for kind, ms in profile["kinds_ms"].items() if kind != "copy")


def packing(profile: dict[str, Any]) -> float:
    return sum(k["ms"] for k in profile["longest"] if any(part in k["kernel"] for part in PACKING))


@pytest.mark.parametrize("name", LAYOUTS)
def test_kernels_of_all_ranks_take_the_time_of_one_ranks(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """One rank is measured right after the others: a card's clocks fall by 1 % from the first minute to the third."""
    layout = LAYOUTS[name]
    by_expert = "moe_group" in layout  # a router does not choose all experts equally often
    splits_rows = bool({"tensor_parallel_degree", "pipeline_parallel_degree"} & set(layout))
    ranks = (0, 1) if by_expert or "pipeline_parallel_degree" in layout else (0,)  # in all others they are alike
    many = []
    for rank in ranks:
        (folder := tmp_path / str(rank)).mkdir()
        many.append(profiled_slice(folder, 2, rank, MICRO_BATCHES, **keys, **layout))
    (folder := tmp_path / "one").mkdir()
    base = {key: layout[key] for key in ("frozen_base",) if key in layout}
    one = profiled_slice(folder, 1, 0, MICRO_BATCHES, **keys, **base)
    alike = 2 / len(ranks)
    tokens = 1 if splits_rows else 2  # in units of what one rank's step has
    total, alone_ms = sum(map(computing, many)) * alike / tokens, computing(one)
    packed = max(0.0, sum(map(packing, many)) * alike / tokens - packing(one)) if by_expert else 0.0
    kinds = {who: profile["kinds_ms"] for who, profile in (("one", one), *zip(ranks, many))}
    told = f"{total:.2f} ms, {packed:.2f} of it packing; one {alone_ms:.2f}; by kind: {kinds}"
    assert total - packed <= alone_ms * (1 + SLOWER), told
