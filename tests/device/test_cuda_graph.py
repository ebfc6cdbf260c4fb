"""Layers replayed as CUDA graphs on one card: the same losses as without, for packs of other documents and several
micro-batches.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from device_cases.graphs import ours

from erniekit.bench.data import make_steps
from erniekit.bench.ours import Ours
from erniekit.bench.workloads import ERNIE_03B, ERNIE_21B, LORA, Rows
from erniekit.data.collate import collate, collate_joined
from erniekit.data.types import Batch, Pack, Sample

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]

LENGTH = 1024
SMALL = {**ERNIE_03B, "num_hidden_layers": 4, "vocab_size": 8192}
SMALL_EXPERTS = {
    **ERNIE_21B, "num_hidden_layers": 4, "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 2, "moe_num_experts": 16, "moe_intermediate_size": 256,
    "moe_layer_end_index": 3,
}  # fmt: skip


def packs(seed: int, count: int) -> Batch:
    """A row of `count` documents of uneven lengths."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), count - 1, replace=False))
    lengths = np.diff([0, *cuts, LENGTH])
    documents = [Sample(*(rng.integers(3, 8192, n).astype(np.int32) for _ in range(2))) for n in lengths]
    return collate([Pack(tuple(documents), seed)], pad_to=LENGTH)


def losses(runner: Ours, steps: list[list[Batch]]) -> list[tuple[float, float]]:
    out = []
    for number, batches in enumerate(steps):
        result = runner.train_step(batches, number + 1)
        out.append((result.loss, result.grad_norm))
    return out


@pytest.mark.parametrize("several", [1, 3])
def test_replayed_layers_train_as_others_do_whatever_documents_come(tmp_path: Path, several: int) -> None:
    steps = [[packs(10 * s + m, 1 + (3 * s + m) % 7) for m in range(several)] for s in range(6)]
    found = {}
    for graph in (False, True):
        runner = ours(tmp_path, graph, SMALL, Rows(1, LENGTH, mean=256), gradient_accumulation_steps=several)
        found[graph] = losses(runner, steps)
        recorded = getattr(runner.built.engine.model.run_layers, "recorded", None)
        assert len(recorded or ()) == (2 if graph else 0), "rows of one document, and packs"
    for (loss, norm), (other, other_norm) in zip(found[False], found[True]):
        # The same kernels on the same numbers; attention adds up dQ in an order of its own each time.
        assert abs(loss - other) < 2e-3 * loss, found
        assert abs(norm - other_norm) < 2e-2 * norm, found


@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_replayed_experts_train_and_tell_of_their_routing_as_others_do(tmp_path: Path, base: str) -> None:
    """Adapters on everything, rows of one document and of two."""
    found, usage = {}, {}
    keys = {**LORA, "frozen_base": base, "moe_aux_loss_lambda": 0.01}
    steps = [[packs(s, 1 + s % 2)] for s in range(8)]
    for graph in (False, True):
        runner = ours(tmp_path, graph, SMALL_EXPERTS, Rows(1, LENGTH, mean=256), **keys)
        found[graph] = losses(runner, steps)
        usage[graph] = {layer: count.clone() for layer, count in runner.built.engine.usage.items()}
        recorded = getattr(runner.built.engine.model.run_layers, "recorded", None)
        assert len(recorded or ()) == (2 if graph else 0), "rows of one document, and packs"
    for (loss, norm), (other, other_norm) in zip(found[False], found[True]):
        assert abs(loss - other) < 2e-3 * loss, found
        assert abs(norm - other_norm) < 5e-2 * norm, found
    assert usage[False].keys() == usage[True].keys() == {1, 2, 3}
    for layer, counts in usage[False].items():
        assert counts.sum() == usage[True][layer].sum()
        assert (counts - usage[True][layer]).abs().sum() < 0.02 * counts.sum(), "but for choices that are nearly even"


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_layers_that_are_replayed_train_alike_whether_compiled_or_not(tmp_path: Path, kind: str) -> None:
    model, keys = (SMALL, {}) if kind == "dense" else (SMALL_EXPERTS, {**LORA, "moe_aux_loss_lambda": 0.01})
    steps = [[packs(s, 1 + s % 2)] for s in range(8)]
    found = {}
    for compiled in (True, False):
        runner = ours(tmp_path, True, model, Rows(1, LENGTH, mean=256), compile=compiled, **keys)
        assert runner.built.plan.config.model.compile is compiled
        found[compiled] = losses(runner, steps)
        assert len(runner.built.engine.model.run_layers.recorded) == 2
    for (loss, norm), (other, other_norm) in zip(found[True], found[False]):
        assert abs(loss - other) < 2e-3 * loss, found
        assert abs(norm - other_norm) < 5e-2 * norm, found


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_layers_that_are_replayed_and_not_compiled_import_no_compiler(tmp_path: Path, kind: str) -> None:
    """In a process of its own; FlashAttention-4 and quack are imported where they are installed."""
    keys = "" if kind == "dense" else ", **t.LORA"
    code = (
        "import sys; from pathlib import Path; import test_cuda_graph as t\n"
        f"model = t.SMALL if {kind == 'dense'} else t.SMALL_EXPERTS\n"
        f"runner = t.ours(Path({str(tmp_path)!r}), True, model, t.Rows(1, t.LENGTH, mean=256), compile=False{keys})\n"
        "t.losses(runner, [[t.packs(s, 1 + s % 2)] for s in range(6)])\n"
        "assert len(runner.built.engine.model.run_layers.recorded) == 2\n"
        "print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]


def test_recording_and_replaying_prints_no_warning(tmp_path: Path) -> None:
    """In a process of its own: torch warns of a stream once a process."""
    code = (
        "from pathlib import Path; import test_cuda_graph as t\n"
        f"runner = t.ours(Path({str(tmp_path)!r}), True, t.SMALL, t.Rows(1, t.LENGTH, mean=256))\n"
        "t.losses(runner, [[t.packs(s, 1 + s % 3)] for s in range(6)])\n"
        "assert len(runner.built.engine.model.run_layers.recorded) == 2"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_rows_of_many_lengths_are_replayed_from_graphs_that_share_their_memory(
    tmp_path: Path, kind: str, several: int
) -> None:
    """Lengths in turn and mixed within a step: no graph writes over what the step of another still needs."""
    lengths = (512, 768, 1024)
    model, keys = (SMALL, {}) if kind == "dense" else (SMALL_EXPERTS, {**LORA, "moe_aux_loss_lambda": 0.01})
    rng = np.random.default_rng(3)

    def row(most: int) -> Batch:
        size = int(rng.integers(most - 200, most + 1))
        ids, labels = (rng.integers(3, 8192, size).astype(np.int32) for _ in range(2))
        return collate_joined([Pack((Sample(ids, labels),), 0)], lengths=lengths)

    steps = [[row(lengths[(s + m) % 3]) for m in range(several)] for s in range(12)]
    found = {}
    for graph in (False, True):
        runner = ours(tmp_path, graph, model, Rows(1, LENGTH), gradient_accumulation_steps=several, **keys)
        layers = runner.built.engine.model.run_layers
        if graph:
            layers.lengths, layers.most = lengths, len(lengths)
        found[graph] = losses(runner, steps)
        assert len(getattr(layers, "recorded", ())) == (3 if graph else 0)
        del runner, layers
        torch.cuda.empty_cache()
    for (loss, norm), (other, other_norm) in zip(found[False], found[True]):
        assert abs(loss - other) < 2e-3 * loss, found
        assert abs(norm - other_norm) < 5e-2 * norm, found


def test_joined_rows_are_packs_of_one_shape_for_compiled_layers_and_graphs(tmp_path: Path) -> None:
    """Two to four rows in one of 1024 tokens: one recording, whatever their number and lengths."""
    rng = np.random.default_rng(4)

    def rows(count: int) -> Batch:
        sizes = rng.integers(100, LENGTH // count, count)
        made = [Sample(*(rng.integers(3, 8192, n).astype(np.int32) for _ in range(2))) for n in sizes]
        return collate_joined([Pack((sample,), k) for k, sample in enumerate(made)], lengths=(LENGTH,))

    steps = [[rows(2 + s % 3)] for s in range(8)]
    found = {}
    for graph in (False, True):
        runner = ours(tmp_path, graph, SMALL, Rows(1, LENGTH, mean=256))
        found[graph] = losses(runner, steps)
        assert len(getattr(runner.built.engine.model.run_layers, "recorded", ())) == (1 if graph else 0)
    for (loss, norm), (other, other_norm) in zip(found[False], found[True]):
        assert abs(loss - other) < 2e-3 * loss, found
        assert abs(norm - other_norm) < 2e-2 * norm, found


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["full", "lora"])
def test_pairs_whose_answers_share_a_prompt_are_replayed(adapters: dict, tmp_path: Path) -> None:
    """DPO's policy; its reference has no gradients and is launched."""
    rows = Rows(1, LENGTH, pairs=2, answer=128)
    steps = [[data.batch] for data in make_steps(rows, 8192, 6, 0)]
    found = {}
    for graph in (False, True):
        runner = ours(tmp_path, graph, SMALL, rows, **adapters, stage="DPO", max_prompt_len=512)
        found[graph] = losses(runner, steps)
        assert len(getattr(runner.built.engine.model.run_layers, "recorded", ())) == (1 if graph else 0)
    assert found[True][0][0] == pytest.approx(math.log(2), abs=1e-3)
    for (loss, norm), (other, other_norm) in zip(found[False], found[True]):
        assert abs(loss - other) < 1e-2, found
        assert abs(norm - other_norm) < 5e-2 * norm, found
