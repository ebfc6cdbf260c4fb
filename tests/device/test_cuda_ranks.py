"""Several ranks on one NVIDIA card, over NCCL: compiled as one rank is, with its losses and its kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import log2, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from device_cases.ranks import run_once, run_ranks
from device_cases.recipes import model_folder, rows

from erniekit.bench.profile import kind_of
from erniekit.bench.workloads import ERNIE_21B

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

# One dense layer and one with experts: kernels are counted, not steps a second, and a layout takes half a minute.
CUT_DOWN = {**ERNIE_21B, "num_hidden_layers": 2, "vocab_size": 32768, "moe_layer_end_index": 1, "moe_num_experts": 32}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": dict(data_parallel_degree=2),
    "ep2": dict(moe_group="ep"),
    "tp2": dict(tensor_parallel_degree=2, sequence_parallel=True),
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
        stage="SFT", fine_tuning="LoRA", lora_rank=32, compute_type="bf16", packing=True, max_seq_len=4096, seed=11,
        model_name_or_path=str(model_folder(folder, "model", CUT_DOWN)), train_dataset_path=str(rows(folder)[0]),
        train_dataset_type="erniekit", train_dataset_prob="1.0", continue_training=False, do_train=True, max_steps=4,
        batch_size=1, learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1, report_to="none",
        save_strategy="no", evaluation_strategy="no", doctor="off", probe_tokens=0, verify="size",
        cache_dir=str(folder / "cache"), cuda_graph=False,
    )  # fmt: skip


Alone = Callable[..., tuple[list[dict], list]]


@pytest.fixture
def alone(keys: dict[str, Any], request: pytest.FixtureRequest) -> Alone:
    """One rank's steps and kernels, with these keys more; kept in pytest's cache."""
    kept = request.config.cache.mkdir("one-rank")  # type: ignore[union-attr]

    def run(**more: Any) -> tuple[list[dict], list]:
        steps, kernels, said = run_once(kept, 1, gradient_accumulation_steps=8, **{**keys, **more})
        assert "compile: None -> True" in said
        return steps, kernels[0]

    return run


def blocks_of(grid: str) -> int:
    return max(1, prod(int(size) for size in re.findall(r"\d+", grid)))


Launches = dict[
    tuple[str, int], list[tuple[float, int]]
]  # kernel and size -> (microseconds of a block, blocks) of each


def computing_launches(kernels: list) -> Launches:
    """What NCCL and copies take is left out. Launches of nearly one size are taken together, as rows that travel are
    another number each time."""
    sized: Launches = {}
    for launched, times in kernels:
        name, _, grid = launched.rpartition("|")
        if "nccl" not in name.lower() and kind_of(name) != "copy":
            count = blocks_of(grid)
            sized.setdefault((name, round(4 * log2(count))), []).extend((time / count, count) for time in times)
    return sized


def undisturbed(profiles: list[list]) -> dict[tuple[str, int], float]:
    """Microseconds that a block of each kernel takes. Two processes take turns on the card, and a kernel that is
    launched when they change waits for its turn: some wait every time, at the beginning of a micro-batch. So the
    quicker launches count, of the profile that has the quickest: one kernel of one size is the same work in all."""
    found: dict[tuple[str, int], float] = {}
    for profile in profiles:
        for key, launches in computing_launches(profile).items():
            each = sorted(time for time, _ in launches)[len(launches) // 10]
            found[key] = min(each, found.get(key, each))
    return found


def by_kernel(kernels: list, each: dict[tuple[str, int], float]) -> dict[str, float]:
    """Milliseconds of each kernel."""
    out: dict[str, float] = {}
    for key, launches in computing_launches(kernels).items():
        out[key[0]] = out.get(key[0], 0.0) + each[key] * sum(count for _, count in launches) / 1e3
    return out


def by_kind(times: dict[str, float]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, took in times.items():
        out[kind_of(name)] = round(out.get(kind_of(name), 0.0) + took, 3)
    return out


def longer(many: list[dict[str, float]], one: dict[str, float]) -> str:
    """The kernels that take most more of all ranks' time than of one rank's."""
    names = set(one).union(*many)
    more = {name: sum(rank.get(name, 0.0) for rank in many) - one.get(name, 0.0) for name in names}
    top = sorted(more, key=lambda name: -more[name])[:12]
    return "; ".join(f"{more[name]:+.1f} ms {name[:60]} (one rank {one.get(name, 0.0):.1f})" for name in top)


def hand_written(kernels: list) -> set[str]:
    """Kernels of ours in a layer: names that compilers number are left out, and the update's (ranks form their common
    norm otherwise)."""
    names = {name.split("|")[0] for name, _ in kernels}
    return {name for name in names if re.fullmatch(r"_?[a-z][a-z_]*", name) and kind_of(name) != "optimizer"}


def trained_as_one(
    name: str, layout: dict[str, Any], alone: Alone, keys: dict[str, Any], folder: Path
) -> tuple[float, float]:
    """Milliseconds of all ranks' kernels and of one rank's, once losses and kernels of ours were found alike."""
    shares_data = not {"tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"} & set(layout)
    base = {key: layout[key] for key in ("frozen_base",) if key in layout}
    one_steps, one_kernels = alone(**base)
    count = 4 if shares_data else 8
    steps, kernels, said = run_ranks(folder / "run", 2, **keys, gradient_accumulation_steps=count, **layout)
    assert "compile: None -> True" in said
    got, want = [s["loss"] for s in steps], [s["loss"] for s in one_steps]
    each = undisturbed([*kernels, one_kernels])
    both, ours = [by_kernel(rank, each) for rank in kernels], by_kernel(one_kernels, each)
    total, one = sum(sum(found.values()) for found in both), sum(ours.values())
    print(f"== {name}: {total:.1f} ms of kernels, one rank {one:.1f}: {total / one:.3f}")
    print(f"   ranks: {[by_kind(found) for found in both]} {got}")
    print(f"   one rank: {by_kind(ours)} {want}")
    print(f"   longer: {longer(both, ours)}")
    assert got == pytest.approx(want, abs=LOSS), (got, want)
    missing = hand_written(one_kernels) - set().union(*(hand_written(rank) for rank in kernels))
    assert not missing, f"one rank runs these, {name} does not: {missing}"
    return total, one


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_are_compiled_and_train_as_one_rank_does(
    name: str, alone: Alone, keys: dict[str, Any], tmp_path: Path
) -> None:
    total, one = trained_as_one(name, LAYOUTS[name], alone, keys, tmp_path)
    assert total <= one * (1 + SLOWER), (total, one)


def test_ranks_of_a_sequence_run_the_kernels_of_one_rank(alone: Alone, keys: dict[str, Any], tmp_path: Path) -> None:
    """Each has half of every row: products of so few tokens take longer for each of them."""
    trained_as_one("cp2", dict(context_parallel_degree=2), alone, keys, tmp_path)
    table = json.loads((tmp_path / "run" / "out" / "run.json").read_text())["kernels"]
    by = {row["operation"]: row["implementation"] for row in table}
    assert by["packed attention"] in ("flash4", "cudnn", "flash")
