"""Sums of squares in fp64, of some rows at a time."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels import wide_squares


def test_squares_of_some_rows_at_a_time_add_up_to_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_squares, "WIDE", 100)
    torch.manual_seed(0)
    whole = torch.randn(41, 30)
    for piece in (whole, whole[:, 3:17], whole[5], whole[7, :1], whole[0, 0], whole[:0], whole.t()):
        kept = piece.clone()
        got = sum(float(square) for square in wide_squares.squares(piece))
        assert got == pytest.approx(float(piece.double().pow(2).sum()), rel=1e-12, abs=0)
        assert torch.equal(piece, kept)
    wide = whole.double()
    assert sum(float(s) for s in wide_squares.squares(wide)) == pytest.approx(
        float(whole.double().pow(2).sum()), rel=1e-12
    )
    assert torch.equal(wide, whole.double()), "squared in a copy, even where none is needed to widen it"
