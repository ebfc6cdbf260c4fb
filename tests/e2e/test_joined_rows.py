"""`packing: False` with length_buckets: joined rows train as rows of their own do, in fp32, whatever stage, model and
layout; only the shapes are others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import erniekit
from erniekit.demo.tiny import make_tiny_model
from erniekit.parallel import compiled
from support.ranks import Ranks
from support.recorded import whole_pairs

ROUNDING = 2e-6  # relative: sums of fp32 numbers in another order, over a few steps
ALL_ROUTER_LOSSES = dict(
    moe_aux_loss_lambda=1e-2, moe_z_loss_lambda=1e-3, moe_orthogonal_loss_lambda=1e-2,
    moe_use_aux_free_update_coef=1e-2, num_nextn_predict_layers=1,
)  # fmt: skip
# Rows of 10 to 79 tokens, two or three in a micro-batch, two of these a step; the evaluation ends with fewer.
UNPACKED = dict(packing=False, batch_size=3, gradient_accumulation_steps=2, max_steps=3, doctor="off")
TOLD = (
    "loss", "grad_norm", "eval_loss", "eval_tokens", "router_aux", "router_z", "router_ortho", "mtp_loss", "moe_load",
    "rewards/margins", "logps/chosen", "eval_rewards/margins",
)  # fmt: skip


def told(folder: Path) -> list[tuple[str, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(name, record[name]) for record in records for name in TOLD if name in record]


def compare(plain: Path, joined: Path) -> None:
    want, got = told(plain), told(joined)
    assert [name for name, _ in got] == [name for name, _ in want]
    assert {"loss", "grad_norm", "eval_loss"} <= {name for name, _ in want}
    assert len({value for name, value in want if name == "loss"}) == 3, "it must really have trained"
    for (name, one), (_, other) in zip(want, got):
        # A reward is what is left of two sums of some hundred: their rounding is absolute.
        assert other == pytest.approx(one, rel=ROUNDING, abs=5e-6 if "rewards" in name else 1e-7), name
    states = [json.loads((folder / "checkpoint-3" / "state.json").read_text()) for folder in (plain, joined)]
    for count in ("packs", "tokens", "trained_tokens", "step"):
        assert states[0][count] == states[1][count] > 0, count


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


@pytest.fixture(scope="module")
def pairs(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_pairs(paddle, tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture
def case(moe: Path, pairs: Path, rows: Path) -> Callable[[str], dict[str, Any]]:
    """The keys of a kind of run."""

    def keys(kind: str) -> dict[str, Any]:
        sft = dict(eval_dataset_path=rows, evaluation_strategy="steps", eval_steps=2)
        dpo = dict(
            sft, stage="DPO", train_dataset_path=pairs, eval_dataset_path=pairs, max_seq_len=160, fine_tuning="LoRA"
        )
        return (
            UNPACKED
            | {
                "dense": sft,
                "experts": dict(sft, model_name_or_path=moe, **ALL_ROUTER_LOSSES),
                "experts, LoRA": dict(sft, model_name_or_path=moe, fine_tuning="LoRA", moe_aux_loss_lambda=1e-2),
                "preferences": dpo,
                "preferences, experts": dict(dpo, model_name_or_path=moe, moe_aux_loss_lambda=1e-2),
            }[kind]
        )  # type: ignore[operator]

    return keys


KINDS = ("dense", "experts", "preferences")
KINDS_TOO = ("experts, LoRA", "preferences, experts")


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS_TOO)])
def test_joined_rows_train_and_evaluate_as_rows_of_their_own_do(
    kind: str, case: Callable, train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "plain", **case(kind), length_buckets="off")
    assert "rows     joined" not in capsys.readouterr().out
    train(tmp_path / "joined", **case(kind), length_buckets="on")
    assert "rows     joined, padded to" in capsys.readouterr().out
    compare(tmp_path / "plain", tmp_path / "joined")


def test_rows_that_are_mostly_padding_are_told_as_a_share_below_100_percent(
    train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train(tmp_path / "out", **(UNPACKED | dict(max_steps=1)), length_buckets="512")
    told = re.search(
        r"^rows     joined, padded to 512 tokens: ([\d.]+) % of all tokens are padding", capsys.readouterr().out, re.M
    )
    assert told
    assert 50 < float(told[1]) < 100


def run(keys: dict[str, Any]) -> None:
    erniekit.run("train", **keys)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor with sequence parallel": dict(tensor_parallel_degree=2, sequence_parallel=True),
    "context": dict(context_parallel_degree=2),
    "pipeline": dict(pipeline_parallel_degree=2),
    "sharding stage 3": dict(sharding="stage3", sharding_parallel_degree=2),
}
TWO_RANKS = (("data", "experts"), ("context", "experts"), ("context", "preferences"))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=() if (layout, kind) in TWO_RANKS[:1] else pytest.mark.full)
        for layout in LAYOUTS
        for kind in KINDS
    ],
)
def test_joined_rows_train_as_rows_of_their_own_do_on_two_ranks(
    layout: str, kind: str, case: Callable, tiny_model: Path, rows: Path, tmp_path: Path, ranks: Ranks
) -> None:
    keys = case(kind)
    if layout in ("pipeline", "tensor with sequence parallel"):
        keys |= dict(num_nextn_predict_layers=0)
    spread = dict(
        model_name_or_path=tiny_model, train_dataset_path=rows, compute_type="fp32", max_seq_len=96, fine_tuning="Full",
        learning_rate=1e-3, report_to="none", device="cpu", 
        cache_dir=tmp_path / "theirs",
    ) | keys | LAYOUTS[layout]  # fmt: skip
    for output, buckets in (("plain", "off"), ("joined", "on")):
        ranks.run(2, run, spread | dict(output_dir=tmp_path / output, length_buckets=buckets))
    compare(tmp_path / "plain", tmp_path / "joined")


@pytest.mark.full  # torch's compiler takes its time
def test_each_bucket_is_compiled_once_whatever_rows_share_it(
    train: Callable, case: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's compiler, with a back end that counts what it is given and runs it as it is."""
    lengths: list[tuple[int, ...]] = []

    def counting(graph: Any, inputs: Any) -> Any:
        lengths.append(next(tuple(x.shape) for x in inputs if getattr(x, "ndim", 0) == 3))
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", counting)
    keys = case("dense") | dict(max_steps=12, batch_size=1, gradient_accumulation_steps=1, evaluation_strategy="no")
    train(tmp_path, **keys, length_buckets="40,64,80", compile=True)
    lengths = [shape for shape in lengths if shape[1] in (40, 64, 80)]
    assert {shape[1] for shape in lengths} == {40, 64, 80}
    # Layers are alike but the compiler may see each once; none is seen again for a row of a bucket met before.
    assert len(lengths) <= 3 * 2, lengths
