"""The pieces of a head's gradients: which rows, in which chunks, summed and scaled how."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import head_gradients
from erniekit.kernels.head_gradients import HeadGradients, spans, spread, times, trained_rows


def test_a_count_finds_the_rows_that_asking_finds():
    labels = torch.tensor([-100, 4, 5, -100, 0])
    assert torch.equal(trained_rows(labels, -100, 3), trained_rows(labels, -100, None))
    assert trained_rows(labels.abs(), -100, 5) is None
    assert trained_rows(labels.abs(), -100, None) is None
    assert trained_rows(torch.full((3,), -100), -100, 0).tolist() == []


@pytest.mark.parametrize("count", [2, 4, 5])
def test_a_wrong_count_never_leaves_tokens_out_in_silence(count: int):
    with pytest.raises(RuntimeError, match="trained tokens were counted"):
        trained_rows(torch.tensor([-100, 4, 5, -100, 0]), -100, count)


def test_chunks_cover_all_rows_once_and_on_a_card_are_even(monkeypatch: pytest.MonkeyPatch):
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert [(s.start, s.stop) for s in spans(5, 2, like)] == [(0, 2), (2, 4), (4, 5)]
    monkeypatch.setattr(head_gradients, "in_place", lambda device: True)
    for rows in (0, 1, 127, 4096, 4097, 9000, 32768):
        parts = spans(rows, 2048, like)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
        assert all(part.stop - part.start <= 4096 for part in parts)
    assert [(s.start, s.stop) for s in spans(4097, 2048, like)] == [(0, 2176), (2176, 4097)]
    assert spans(4097, 2048, like.float())[0] == slice(0, 1408)


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_needed_adds_up_and_nothing_else_is_formed(chunks: int):
    torch.manual_seed(0)
    grad, x, weight = torch.randn(6, 5), torch.randn(6, 4), torch.randn(5, 4)
    for needed in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        made = HeadGradients(needed, 6, weight, torch.zeros(5), chunks)
        for part in torch.arange(6).chunk(chunks):
            span = slice(int(part[0]), int(part[-1]) + 1)
            made.add(span, grad[span], x[span])
        for want, ours, theirs in zip(needed, made.finish(), (grad @ weight, grad.t() @ x, grad.sum(0))):
            assert (ours is not None) == want
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


def test_a_factor_is_not_rounded_to_the_gradients_dtype():
    """1/3000 in bf16 is off by 0.1 %."""
    grad = torch.full((4, 4), 3000.0, dtype=torch.bfloat16)  # 2992 in bf16
    factor = torch.tensor(1 / 3000)
    assert torch.equal(times(grad, factor, None), (grad.float() * factor).bfloat16())
    assert torch.equal(times(grad.float(), factor, torch.bfloat16), (grad.float() * factor).bfloat16())
    assert times(None, factor, None) is None


def test_rows_go_back_to_their_places():
    rows = torch.ones(2, 3)
    assert spread(rows, torch.tensor([3, 1]), 5).sum(-1).tolist() == [0, 3, 0, 3, 0]
    assert spread(rows, None, 2) is rows
