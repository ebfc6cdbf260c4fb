"""Rules on mixtures that change at steps and on rows ordered by difficulty."""

from __future__ import annotations

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError

TWO = ["train_dataset_path=a.jsonl,b.jsonl", "do_train=True"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["mix_schedule=5=1/1/1"], "3 shares, and 2 files"),
        (["mix_schedule=5=1/1", "mix_strategy=concat"], "drawn at random"),
        (["mix_schedule=5=1", "train_dataset_path=a.jsonl"], "several files"),
        (["mix_schedule=1=1/1", "train_dataset_prob=1,2"], "train_dataset_prob holds until"),
        (["mix_schedule=5=1/1", "compat=erniekit"], "both decide the order of rows"),
        (["mix_schedule=5=1/1", "stage=PT"], "stage is PT"),
        (["curriculum=length", "stage=VL-SFT"], "stage is VL-SFT"),
        (["mix_schedule=5:1/1"], "is not a stage of a mixture"),
    ],
)
def test_what_cannot_be_ordered_is_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load([*TWO, *words])


def test_a_mixture_is_a_list_of_steps_and_says_which_is_never_reached() -> None:
    cfg = load([*TWO, "mix_schedule=5=1/0,90=0.5/0.5", "max_steps=50"])
    assert cfg.data.mix_stages == ((5, (1.0, 0.0)), (90, (0.5, 0.5)))
    assert any("step 90 is never reached" in str(note) for note in cfg.notes)


def test_a_curriculum_fills_packs_in_its_order_unless_they_are_asked_to_be_full() -> None:
    assert load([*TWO, "curriculum=length"]).data.greedy_intokens is False
    cfg = load([*TWO, "curriculum=length", "greedy_intokens=True"])
    assert cfg.data.greedy_intokens is True
    assert any("within those the order is lost" in str(note) for note in cfg.notes)
    notes = [str(note) for note in load([*TWO, "curriculum_epochs=2"]).notes]
    assert any("without effect: there is no curriculum" in note for note in notes)
