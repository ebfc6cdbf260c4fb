"""The sampler: each row by its own parameters, as the definitions say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from erniekit.serve.engines.base import SamplingParams
from erniekit.serve.engines.sampler import SamplerRow, sample
from erniekit.serve.engines.sequence import signed


def row(prompt=(), generated=(), stop=(), vocab=6, seed=0, **wishes) -> SamplerRow:
    return SamplerRow(
        prompt,
        generated,
        SamplingParams(**{"max_tokens": 9, "temperature": 0, **wishes}),
        frozenset(stop),
        vocab,
        seed,
    )


SCORES = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0, 2.9]])


def pick(**wishes) -> int:
    (token,) = sample(SCORES, [row(**wishes)])
    return token.id


def test_without_wishes_the_likeliest_is_taken():
    assert pick() == 1


def test_penalties_bias_and_stop_tokens_move_the_choice():
    assert pick(generated=[1], presence_penalty=0.5) == 5
    assert pick(generated=[1, 1], frequency_penalty=0.04) == 1
    assert pick(generated=[1, 1, 1], frequency_penalty=0.04) == 5
    assert pick(prompt=[1], repetition_penalty=1.1) == 5
    assert pick(prompt=[1], presence_penalty=2) == 1, "presence counts what was said, not what was asked"
    assert pick(bias=((3, 10.0),)) == 3
    assert pick(stop=[1], min_tokens=2, generated=[0]) == 5
    assert pick(stop=[1], min_tokens=2, generated=[0, 0]) == 1
    assert pick(vocab=1) == 0
    assert pick(vocab=1, prompt=[5], repetition_penalty=2.0, stop=[5], min_tokens=1) == 0
    assert pick(vocab=3, bias=((5, 50.0),)) == 1, "padding spells nothing"


def test_each_row_of_a_batch_has_its_own_wishes():
    scores = SCORES.repeat(4, 1)
    rows = [row(), row(bias=((3, 10.0),)), row(temperature=1.0, top_p=0.1), row(temperature=0.0001, top_p=1.0)]
    assert [token.id for token in sample(scores, rows)] == [1, 3, 1, 1]
    assert torch.equal(scores, SCORES.repeat(4, 1)), "the model's scores are its own"


def test_a_neighbour_with_top_k_changes_no_others_draw():
    alone = [sample(SCORES, [row(temperature=1.0, top_p=0.9, seed=k)])[0].id for k in range(40)]
    for k in range(40):
        rows = [row(temperature=1.0, top_p=0.9, seed=k), row(temperature=1.0, top_k=1, seed=k)]
        assert [token.id for token in sample(SCORES.repeat(2, 1), rows)] == [alone[k], 1]


def test_logprobs_are_the_models_own_before_any_wish():
    told = SCORES[0].log_softmax(0)
    (token,) = sample(SCORES, [row(bias=((3, 10.0),), logprobs=2)])
    assert token.id == 3
    assert token.logprob == pytest.approx(float(told[3]), abs=1e-6)
    assert [id for id, _ in token.top] == [1, 5]
    (bare,) = sample(SCORES, [row(logprobs=0)])
    assert (bare.top, bare.logprob) == ((), pytest.approx(float(told[1]), abs=1e-6))


def test_scores_that_are_no_numbers_choose_nothing_and_harm_no_other_row():
    scores = torch.cat([SCORES, SCORES * float("nan"), SCORES])
    tokens = sample(scores, [row(), row(temperature=1.0), row(temperature=1.0, top_p=0.1)])
    assert [token and token.id for token in tokens] == [1, None, 1]


TINY, EPS, HUGE = 2.0**-1074, 2.0**-23, torch.finfo(torch.float32).max  # TINY: the least a float64 holds
EDGES = [0.0, TINY, 1e-300, 1e-45, 1e-38, 1e-10, EPS, 1e-5]


def bounded(low: float, high: float) -> st.SearchStrategy[float]:
    edges = [v for v in (*EDGES, *(-v for v in EDGES), low, high, 1.0, 1 - EPS, 1 + EPS) if low <= v <= high]
    return st.sampled_from(edges) | st.floats(low, high)


WISHES = st.fixed_dictionaries(
    {
        "temperature": bounded(0, 2),
        "top_p": bounded(0, 1),
        "top_k": st.sampled_from([0, 1, 2, 2**31 - 1]) | st.integers(0, 2**31 - 1),
        "repetition_penalty": bounded(0.01, 10),
        "frequency_penalty": bounded(-2, 2),
        "presence_penalty": bounded(-2, 2),
        "min_tokens": st.sampled_from([0, 1, 2**31 - 1]),
        "bias": st.lists(st.tuples(st.integers(0, 6), bounded(-100, 100)), max_size=3).map(tuple),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
        "seed": st.sampled_from([None, 0, 2**63 - 1, 2**63 + 7, -(2**63)]),
    }
)
LOGITS = st.lists(
    st.sampled_from([0.0, 1.0, -1.0, 1e4, -1e4, 1e-38, 3e38, -3e38, HUGE, -HUGE]) | st.floats(-1e4, 1e4, width=32),
    min_size=7, max_size=7,
)  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(LOGITS, WISHES), min_size=1, max_size=4),
    st.sampled_from([5, 7]),
    st.integers(-(2**63), 2**63 - 1),
)
@example([([1.0] * 7, {"temperature": 1.0, "top_p": 1e-300})], 7, 0)
@example([([1.0] * 7, {"temperature": 1e-300, "top_p": 1.0})], 7, 0)
@example([([HUGE] * 6 + [-HUGE], {"temperature": 1e-5, "top_p": 1.0, "repetition_penalty": 0.01})], 7, 3)
def test_every_allowed_value_gives_a_token_for_any_finite_scores(batch, vocab, seed):
    rows = []
    for _, wishes in batch:
        wish = SamplingParams(**{"max_tokens": 2**31 - 1, **wishes})
        given_seed = seed if wish.seed is None else signed(wish.seed)
        rows.append(SamplerRow((0, 6, 1), (2, 2, 3, 0), wish, frozenset({1, 4, 99}), vocab, given_seed))
    scores = torch.tensor([logits for logits, _ in batch])
    tokens = sample(scores, rows)
    for k, (token, row) in enumerate(zip(tokens, rows)):
        assert token is not None
        assert 0 <= token.id < vocab
        assert sample(scores[k : k + 1], [row]) == [token], "alone as in company"
        if token.logprob is not None:
            assert -9999 <= token.logprob <= 0
            assert all(-9999 <= value <= 0 for _, value in token.top)


def test_a_cold_or_narrow_choice_is_the_likeliest_token():
    for wishes in ({"temperature": 1e-300}, {"temperature": 9e-6}, {"temperature": 1.0, "top_p": 1e-300}):
        assert {pick(seed=seed, **wishes) for seed in range(20)} == {1}


def test_stop_tokens_that_are_all_there_is_or_beyond_the_vocabulary_harm_nothing():
    assert pick(vocab=1, stop=[0], min_tokens=3) == 0
    assert pick(stop=[1, 4096], min_tokens=3) == 5
    assert pick(stop=[], min_tokens=3) == 1


def test_a_row_without_numbers_may_ask_for_logprobs():
    scores = torch.cat([SCORES * float("nan"), SCORES])
    tokens = sample(scores, [row(vocab=3, logprobs=2), row(vocab=3, logprobs=2)])
    assert tokens[0] is None
    assert tokens[1].id == 1
