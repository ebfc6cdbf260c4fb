"""What a plan counts beside the trained model: references, teachers, score heads; and what it names as not counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli.main import main
from erniekit.config import load
from erniekit.models import costs
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CARDS, rates_of
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import evaluate
from erniekit.recipes.plan_command import _notes
from erniekit.recipes.planning import job_of, shape_of
from support.planned_recipe import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RECIPE)
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stage=KTO", "reference_logps=cached"], "the pass over all rows before the first step"),
        (["stage=RM", "fine_tuning=Full"], "layouts of data parallelism and sharding"),
        (["stage=CLS"], "more than 2 classes"),
        (["fine_tuning=Full", "teacher_model_name_or_path=a"], "the teacher's weights"),
        (["eval_generate=2"], "answers that evaluations generate"),
    ],
)
def test_what_is_notes_is_said(words: list[str], said: str) -> None:
    pool = DevicePool(CARDS["a100"], rates_of(CARDS["a100"]), 1)
    assert any(said in text for text in _notes(load(words, "train"), pool))
    assert not list(_notes(load([], "train"), pool))


def counted(recipe: Path, *words: str) -> tuple[Any, Any]:
    """The job of a recipe, and what one A100 makes of it."""
    cfg = load([str(recipe), "gradient_accumulation_steps=1", *words], "train")
    job = job_of(cfg, shape_of(cfg), 1)
    card = CARDS["a100"]
    return job, evaluate(job, Layout(), DevicePool(card, rates_of(card), 1), exact=True)


def test_passes_without_gradient_and_the_reference_of_kto_are_counted(recipe: Path) -> None:
    cached = ["stage=KTO", "reference_logps=cached"]
    cut = [*cached, "context_parallel_degree=2"]  # in 16 bits they are not kept
    all_words = ([], ["stage=DPO"], ["stage=KTO"], cached, cut)
    sft, dpo, kto, kept, live = (counted(recipe, *words) for words in all_words)
    assert [job.forwards for job, _ in (sft, dpo, kto, kept, live)] == [0, 1, 3, 1, 3]
    assert sft[1].seconds < kept[1].seconds < kto[1].seconds
    weights = 2 * costs.parameters(sft[0].model)
    assert kto[1].most.weights - kept[1].most.weights == pytest.approx(weights, rel=1e-6)
    adapters, _ = counted(recipe, "stage=KTO", "fine_tuning=LoRA")
    assert adapters.forwards == 3, "the model without its adapters is the reference"
    assert not adapters.blocks.storing.reference


def test_a_score_head_is_counted_in_the_place_of_the_lm_head(recipe: Path) -> None:
    sft, made = counted(recipe)
    rewards, of_rewards = counted(recipe, "stage=RM")
    classes, _ = counted(recipe, "stage=CLS", "class_labels=a,b,c")
    hidden, tokens = sft.model.hidden_size, sft.model.vocab_size
    own = 0 if sft.model.tie_word_embeddings else tokens * hidden
    assert costs.parameters(rewards.model) == costs.parameters(sft.model) - own + hidden
    assert costs.parameters(classes.model) == costs.parameters(rewards.model) + 2 * hidden
    assert of_rewards.seconds < made.seconds
    adapters, _ = counted(recipe, "stage=CLS", "class_labels=a,b,c", "fine_tuning=LoRA")
    assert "score.weight" in adapters.blocks.storing.trained


def test_a_teacher_is_whole_on_every_rank_and_runs_forward(recipe: Path) -> None:
    alone, of_one = counted(recipe)
    both, of_two = counted(recipe, "teacher_model_name_or_path=baidu/ERNIE-4.5-0.3B-Paddle")
    assert both.teacher == alone.model
    size = 2 * costs.parameters(alone.model)
    assert of_two.most.weights - of_one.most.weights == pytest.approx(size, rel=1e-6)
    assert of_two.most.logits > of_one.most.logits + 7 * 4 * 2048 * alone.model.vocab_size
    assert of_two.seconds > 1.2 * of_one.seconds


@pytest.mark.parametrize("words", [["stage=RM"], ["teacher_model_name_or_path=baidu/ERNIE-4.5-0.3B-Paddle"]])
def test_only_layouts_that_the_run_takes_are_ranked(words: list[str], recipe: Path, capsys: Any) -> None:
    assert main(["plan", str(recipe), "--cluster", "4xA100", "--json", *words]) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    axes = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
    assert ranked
    assert all(one["keys"].get(axis, 1) == 1 for one in ranked for axis in axes)
