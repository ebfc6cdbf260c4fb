"""What changed since a checkpoint is said in words; no digest reaches the screen."""

from __future__ import annotations

import pytest

from erniekit.recipes.changes import (
    BASE,
    MODEL_CONFIG,
    TRAIN_DATA,
    content_letters,
    describe_changes,
    other_states,
    other_weights,
)

OLD = {"seed": 1, TRAIN_DATA: ["9f31aa", "07bc11"], BASE: "5d41402a", MODEL_CONFIG: "7d793037"}
OTHER = "has other content, or its share or the tokenizer changed"
FILES = ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"seed": 2}, "seed: 1 -> 2"),
        ({TRAIN_DATA: ["9f31aa"]}, "train data: 2 data sets then, 1 now"),
        ({TRAIN_DATA: ["07bc11", "9f31aa"]}, "train data: the same files in another order"),
        ({TRAIN_DATA: ["9f31aa", "a"]}, f"train data: b.jsonl {OTHER}"),
        ({TRAIN_DATA: ["9f31aa", "07bc12-e0"]}, f"train data: b.jsonl {OTHER}"),
        ({BASE: "aaaaaa"}, "base model: is another model, or its weights have changed"),
        ({MODEL_CONFIG: "aaaaaa"}, "model's config.json: is not what it was when the checkpoint was saved"),
        ({"new key": 3, "seed": 1}, None),
    ],
)  # fmt: skip
def test_each_change_is_a_line_without_a_digest(now: dict[str, object], words: str | None):
    assert describe_changes(OLD, now, FILES) == ([words] if words else [])


def test_pictures_that_changed_below_the_same_rows_are_named():
    saved, now = {TRAIN_DATA: ["9f31aa-01", "07bc11-02"]}, {TRAIN_DATA: ["9f31aa-01", "07bc11-03"]}
    words = "train data: a picture or video that rows of b.jsonl name is not what it was"
    assert describe_changes(saved, now, FILES) == [words]


LORA = {"fine_tuning": "LoRA", "lora_rank": 8, "compute_type": "fp32", "optim": "adamw"}


@pytest.mark.parametrize(
    ("saved", "now", "weights", "states"),
    [
        ({}, {"fine_tuning": "Full", "lora_rank": 4}, ["fine_tuning"], []),
        ({}, {"lora_rank": 4, "use_dora": True}, ["lora_rank"], []),
        ({"fine_tuning": "Full"}, {"fine_tuning": "Full", "lora_rank": 4}, [], []),
        ({}, {"compute_type": "bf16"}, [], ["compute_type"]),
        ({"compute_type": "bf16"}, {"optim": "muon"}, [], ["optim"]),
        ({}, {"seed": 2}, [], []),
    ],
)  # fmt: skip
def test_changes_that_no_checkpoint_fits_are_told_from_those_that_can_be_overridden(
    saved: dict[str, object], now: dict[str, object], weights: list[str], states: list[str]
):
    """Of fp32 the states are the moments, which every precision saves; a key the checkpoint lacks was not compared."""
    then, mine = {**LORA, **saved}, {**LORA, **now}
    assert (other_weights(then, mine), other_states(then, mine)) == (weights, states)


def test_contents_of_ranks_are_told_apart_by_letters():
    assert content_letters(['["9f31aa"]', '["07bc11"]', '["9f31aa"]']) == {
        '["9f31aa"]': "content A",
        '["07bc11"]': "content B",
    }
