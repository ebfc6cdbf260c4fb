"""Drawing tokens: by the definitions of temperature, top_p and top_k, and by the Triton kernel as by the definition."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.sampling import DrawParams, draw, reference, uniform

SCORES = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0, 2.9])


def params(count: int, temperature=1.0, top_p=1.0, top_k=0, vocab=6, seeds=None) -> DrawParams:
    def each(value, dtype):
        return value if isinstance(value, torch.Tensor) else torch.full((count,), value, dtype=dtype)

    return DrawParams(
        each(temperature, torch.float32),
        each(top_p, torch.float32),
        each(top_k, torch.int64),
        each(vocab, torch.int64),
        torch.arange(count) if seeds is None else seeds,
    )


def drawn(count: int = 500, **wishes) -> list[int]:
    return draw(SCORES.repeat(count, 1), params(count, **wishes), torch.full((count,), 3)).tolist()


def test_numbers_of_seeds_and_places_are_spread_evenly_and_repeat() -> None:
    numbers = uniform(torch.arange(100).repeat_interleave(100), torch.arange(100).repeat(100))
    assert 0 <= float(numbers.min()) < 1e-3
    assert 1 - 1e-3 < float(numbers.max()) < 1
    assert (numbers.histc(10, 0, 1) - 1000).abs().max() < 130, "four standard deviations"
    assert numbers.unique().numel() == 10_000
    assert torch.equal(uniform(torch.tensor([7]), torch.tensor([5])), numbers[705:706])


def test_tokens_are_drawn_as_often_as_their_chances_say() -> None:
    found = torch.tensor(drawn(4000, temperature=2.0)).bincount(minlength=6) / 4000
    assert torch.allclose(found, (SCORES / 2).softmax(0), atol=0.03), "0.03 is four standard deviations"


def test_top_p_keeps_the_fewest_that_make_up_the_share_and_top_k_so_many() -> None:
    chances = SCORES.softmax(0)  # 1: .40, 5: .36, 2: .15
    assert chances[1] < 0.5 < chances[1] + chances[5]
    assert set(drawn(top_p=0.5)) == {1, 5}
    assert set(drawn(top_k=1)) == {1}
    assert set(drawn(top_k=3)) == {1, 5, 2}
    assert drawn(top_k=50) == drawn()
    assert set(drawn(top_k=2, top_p=0.5)) == {1}, "of the two alone, the first makes up more than a half"
    assert set(drawn(top_k=2, top_p=0.6)) == {1, 5}


def test_no_heat_takes_the_likeliest_that_spells_something() -> None:
    assert set(drawn(temperature=0.0)) == {1}
    assert set(drawn(temperature=0.0, vocab=1)) == {0}
    assert set(drawn(vocab=2)) == {0, 1}


def test_scores_that_are_no_numbers_draw_nothing() -> None:
    rows = torch.stack([SCORES * float("nan"), SCORES, SCORES + float("inf"), SCORES])
    heat = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert [id >= 0 for id in draw(rows, params(4, heat), torch.zeros(4, dtype=torch.int64)).tolist()] == [
        False, True, False, True
    ]  # fmt: skip


def test_the_kernel_draws_what_the_definition_draws() -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    from erniekit.kernels.triton import sampling as kernels
    from support.interpreted import bound_loops_by_numbers_on_the_device

    bound_loops_by_numbers_on_the_device()
    torch.manual_seed(0)
    R, V = 6, 40
    logits = torch.randn(R, V) * 3
    logits[4] = float("nan")
    logits[5, 5] = float("-inf")
    wishes = DrawParams(
        torch.tensor([0.0, 1.5, 0.7, 1.0, 1.0, 0.0]),
        torch.tensor([1.0, 1.0, 0.7, 1.0, 1.0, 0.1]),
        torch.tensor([0, 0, 7, 5, 0, 3]),
        torch.tensor([V, 33, V, 200, V, V]),
        torch.tensor([0, -(2**63), 2**63 - 1, 4, 5, 6]),
    )
    places = torch.arange(3000, 3000 + R)
    wanted = reference(logits, wishes, places)
    assert kernels.draw(logits, wishes, places, block=32).tolist() == wanted.tolist()
    assert int(wanted[4]) == -1
