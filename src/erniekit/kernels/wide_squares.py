"""Sums of squares in fp64, for norms: on a CPU torch adds fp32 in fp32, and is 1 % low for an embedding's gradient.

Called by kernels/adamw.py and parallel/gradients.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

WIDE = 16 * 1024 * 1024  # elements that are in fp64 at once


def sum_of_squares(pieces: Iterable[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """fp64 [] on the device that the pieces are on."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for piece in pieces:
        for square in squares(piece):
            total += square
    return total


def squares(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of some rows at a time: torch has no reduction that widens fp32 on the way, and a wide copy of an embedding's
    gradient is twice its size."""
    if not piece.numel():
        return
    piece = piece.reshape(-1) if piece.dim() == 0 else piece
    rows = max(1, WIDE * piece.shape[0] // piece.numel())
    for part in piece.split(rows):
        yield part.to(torch.float64, copy=True).square_().sum()
