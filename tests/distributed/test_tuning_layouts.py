"""Muon, chosen weights and noise on embeddings in layouts of several ranks: the run of one process, and its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.test_reshard import curve, files, go, place
from erniekit.demo.tiny import make_tiny_model
from support.ranks import Ranks

__all__ = ["place"]
pytestmark = pytest.mark.xdist_group("ranks")

KEYS: dict[str, Any] = dict(
    optim="muon", train_only="model.layers.*", freeze="*norm*", neftune_noise_alpha=5, max_steps=4, save_steps=2
)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, place: Path) -> Path:
    return go(ranks, place, "one", "muon-one", **KEYS)


@pytest.mark.parametrize(
    "name", ["fsdp2", *(pytest.param(n, marks=pytest.mark.full) for n in ("tp2", "dp2", "pp2", "cp2", "tp2fsdp2"))]
)
def test_a_layout_draws_the_curve_of_one_process(name: str, ranks: Ranks, place: Path, alone: Path) -> None:
    out = go(ranks, place, name, f"muon-{name}", **KEYS)
    assert curve(out) == pytest.approx(curve(alone), abs=1e-5)


def test_muons_state_comes_through_another_layout_bit_for_bit(ranks: Ranks, place: Path, alone: Path) -> None:
    point = alone / "checkpoint-2"
    keys = {**KEYS, "resume_from_checkpoint": point, "max_steps": 2, "override_resume": True}
    again = go(ranks, place, "tp2", "muon-resharded", **keys)
    assert any("momentum" in name for name in files(point))
    assert files(again / "checkpoint-2") == files(point)


@pytest.mark.full
@pytest.mark.parametrize("name", ["dp2", "fsdp2"])
def test_experts_on_ranks_of_their_own_draw_the_curve_of_one_process(
    name: str, ranks: Ranks, place: Path, tmp_path: Path
) -> None:
    base = make_tiny_model(tmp_path / "moe", family="ernie4_5_moe")
    keys = dict(optim="muon", model_name_or_path=base, max_steps=3, learning_rate=1e-3)
    alone = go(ranks, place, "one", f"experts-one-{name}", **keys)
    spread = dict(use_expert_parallel=True, expert_parallel_degree=2)
    out = go(ranks, place, name, f"experts-{name}", **keys, **spread)
    assert curve(out) == pytest.approx(curve(alone), abs=1e-4)


ADAPTERS: dict[str, dict[str, Any]] = {"dora": dict(use_dora=True), "pissa": dict(lora_init="pissa")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("dora", n, marks=pytest.mark.full) for n in ("fsdp2", "dp2", "pp2", "cp2")),
        *(pytest.param("pissa", n, marks=pytest.mark.full) for n in ("fsdp2", "tp2", "pp2", "tp2fsdp2")),
    ],
)
def test_adapters_with_lengths_or_principal_starts_draw_the_curve_of_one_process(
    kind: str, name: str, ranks: Ranks, place: Path
) -> None:
    keys = dict(fine_tuning="LoRA", max_steps=3, **ADAPTERS[kind])
    alone = go(ranks, place, "one", f"{kind}-one-{name}", **keys)
    out = go(ranks, place, name, f"{kind}-{name}", **keys)
    assert curve(out) == pytest.approx(curve(alone), abs=2e-6)
