"""Choosing a token: each row by its own wishes, as the definitions say."""

from __future__ import annotations

import random

import pytest
import torch

from erniekit.serve.engines.base import Choosing
from erniekit.serve.engines.choose import Row, choose


def row(prompt=(), said=(), stop=(), vocab=6, seed=0, **wishes) -> Row:
    return Row(
        prompt,
        said,
        Choosing(**{"max_tokens": 9, "temperature": 0, **wishes}),
        frozenset(stop),
        vocab,
        random.Random(seed),
    )


SCORES = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0, 2.9]])


def pick(**wishes) -> int:
    (token,) = choose(SCORES, [row(**wishes)])
    return token.id


def test_without_wishes_the_likeliest_is_taken():
    assert pick() == 1


def test_penalties_bias_and_stop_tokens_move_the_choice():
    assert pick(said=[1], presence_penalty=0.5) == 5
    assert pick(said=[1, 1], frequency_penalty=0.04) == 1
    assert pick(said=[1, 1, 1], frequency_penalty=0.04) == 5
    assert pick(prompt=[1], repetition_penalty=1.1) == 5
    assert pick(prompt=[1], presence_penalty=2) == 1, "presence counts what was said, not what was asked"
    assert pick(bias=((3, 10.0),)) == 3
    assert pick(stop=[1], min_tokens=2, said=[0]) == 5
    assert pick(stop=[1], min_tokens=2, said=[0, 0]) == 1
    assert pick(vocab=1) == 0
    assert pick(vocab=1, prompt=[5], repetition_penalty=2.0, stop=[5], min_tokens=1) == 0
    assert pick(vocab=3, bias=((5, 50.0),)) == 1, "padding spells nothing"


def test_each_row_of_a_batch_has_its_own_wishes():
    scores = SCORES.repeat(4, 1)
    rows = [row(), row(bias=((3, 10.0),)), row(temperature=1.0, top_p=0.1), row(temperature=0.0001, top_p=1.0)]
    assert [token.id for token in choose(scores, rows)] == [1, 3, 1, 1]
    assert torch.equal(scores, SCORES.repeat(4, 1)), "the model's scores are its own"


def test_tokens_are_drawn_as_often_as_their_chances_say():
    count = 4000
    rows = [row(temperature=2.0, top_p=1.0, seed=k) for k in range(count)]
    drawn = torch.tensor([token.id for token in choose(SCORES.repeat(count, 1), rows)]).bincount(minlength=6) / count
    wanted = (SCORES[0] / 2).softmax(0)
    assert torch.allclose(drawn, wanted, atol=0.03), "0.03 is four standard deviations"


def test_top_p_keeps_the_fewest_tokens_that_make_up_the_share():
    chances = SCORES[0].softmax(0)  # 1: .40, 5: .36, 2: .15
    assert chances[1] < 0.5 < chances[1] + chances[5]
    drawn = {t.id for t in choose(SCORES.repeat(500, 1), [row(temperature=1.0, top_p=0.5, seed=k) for k in range(500)])}
    assert drawn == {1, 5}


def drawn_with(**wishes) -> set[int]:
    rows = [row(temperature=1.0, seed=k, **wishes) for k in range(500)]
    return {token.id for token in choose(SCORES.repeat(500, 1), rows)}


def test_top_k_keeps_so_many_and_top_p_is_a_share_of_those():
    assert drawn_with(top_k=1) == {1}
    assert drawn_with(top_k=3) == {1, 5, 2}
    assert drawn_with(top_k=50) == drawn_with()
    assert drawn_with(top_k=2, top_p=0.5) == {1}, "of the two alone, the first makes up more than a half"
    assert drawn_with(top_k=2, top_p=0.6) == {1, 5}


def test_a_neighbour_with_top_k_changes_no_others_draw():
    alone = [choose(SCORES, [row(temperature=1.0, top_p=0.9, seed=k)])[0].id for k in range(40)]
    for k in range(40):
        rows = [row(temperature=1.0, top_p=0.9, seed=k), row(temperature=1.0, top_k=1, seed=k)]
        assert [token.id for token in choose(SCORES.repeat(2, 1), rows)] == [alone[k], 1]


def test_logprobs_are_the_models_own_before_any_wish():
    told = SCORES[0].log_softmax(0)
    (token,) = choose(SCORES, [row(bias=((3, 10.0),), logprobs=2)])
    assert token.id == 3
    assert token.logprob == pytest.approx(float(told[3]), abs=1e-6)
    assert [id for id, _ in token.top] == [1, 5]
    (bare,) = choose(SCORES, [row(logprobs=0)])
    assert (bare.top, bare.logprob) == ((), pytest.approx(float(told[1]), abs=1e-6))


def test_scores_that_are_no_numbers_choose_nothing_and_harm_no_other_row():
    scores = torch.cat([SCORES, SCORES * float("nan"), SCORES])
    tokens = choose(scores, [row(), row(temperature=1.0), row(temperature=1.0, top_p=0.1)])
    assert [token and token.id for token in tokens] == [1, None, 1]
