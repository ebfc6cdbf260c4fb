"""What patterns and Muon change in the account of a run's memory: counted against the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.demo.tiny import make_tiny_model
from erniekit.parallel.layout import Layout
from erniekit.planner.static_bytes import TensorBlocks
from erniekit.recipes import memory_decisions, trained_weights
from erniekit.recipes.planning import shape_of, sharding_of, storing_of
from support.rank_bytes import of_rank


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), family="llama")


def test_frozen_weights_have_no_states_in_any_account(base: Path) -> None:
    words = [f"model_name_or_path={base}", "train_only=model.layers.1", "do_train=True"]
    cfg = load(words)
    assert (cfg.lora.fine_tuning, cfg.lora.lora) == ("Full", False), "patterns choose among the model's own weights"
    shape = shape_of(cfg)
    trained = sum(p.numel() for p in shape.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in shape.model.parameters())
    assert memory_decisions.trained_share(cfg, shape.config) == pytest.approx(trained / total)
    sharding = sharding_of(shape.model, shape.spec.plan, Layout())
    counted = of_rank(sharding, 0, storing_of(cfg, shape.model))
    assert counted.trained == trained
    assert counted.moments == pytest.approx(8 * trained, rel=1e-3)
    blocks = TensorBlocks(sharding, (False, False), storing_of(cfg, shape.model))
    assert blocks.shares(Layout(), 1)["dense"].trained == trained, "a layer that trains stands for all: never too few"


def test_muon_keeps_half_of_the_moments_of_matrices(base: Path) -> None:
    cfg = load([f"model_name_or_path={base}", "fine_tuning=Full", "optim=muon", "do_train=True"])
    shape = shape_of(cfg)
    counts = {n: p.numel() for n, p in shape.model.named_parameters()}
    matrices = sum(n for name, n in counts.items() if name.startswith("layers.") and "norm" not in name)
    assert trained_weights.muon_share(cfg, shape.config) == pytest.approx(matrices / sum(counts.values()))
    sharding = sharding_of(shape.model, shape.spec.plan, Layout())
    counted = of_rank(sharding, 0, storing_of(cfg, shape.model))
    want = 8 * sum(counts.values()) - 4 * matrices
    assert counted.moments == pytest.approx(want, rel=1e-3)  # and 4 bytes a tensor, of its number of updates
    assert memory_decisions.states_bytes(cfg, shape.config) * sum(counts.values()) == pytest.approx(
        want + 4 * sum(counts.values())
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["optim=muon"], "LoRA trains none"),
        (["optim=muon", "fine_tuning=Full", "optim_states=8bit"], "optim_states is 8bit"),
        (["optim=muon", "fine_tuning=Full", "update_in_backward=True"], "update_in_backward is True"),
        (["fine_tuning=LoRA", "freeze=lm_head"], "freeze chooses among the model's own weights"),
        (["neftune_noise_alpha=5", "stage=DPO"], "noise on embeddings is for stage: SFT"),
    ],
)
def test_what_a_method_does_not_do_is_refused_by_name(words: list[str], what: str) -> None:
    with pytest.raises(Exception, match=what):
        load([*words, "do_train=True"])


def test_keys_of_muon_without_muon_are_said_to_do_nothing() -> None:
    notes = [str(note) for note in load(["muon_momentum=0.9", "do_train=True"]).notes]
    assert any("muon_momentum" in note and "without effect: optim is adamw" in note for note in notes)
