"""DoRA: each row of an adapted weight has a trained length of its own, besides its low-rank update.

y = m * (W x + s B A x) / |W + s B A| + bias, of every row; the length in the divisor is a constant to gradients, as the
paper (Liu et al., 2024, section 4.3) and PEFT have it. Put in place by inject.py. T any leading dims.
"""

from __future__ import annotations

import torch

from erniekit.lora.layers import LoRALinear

SHORTEST = 1e-12  # a row of zeros has no direction


class DoRALinear(LoRALinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        if not self.active:
            return y
        bias = self.base.added_bias
        product = y if bias is None else y - bias
        adapted = self._added(product, self._products(x)) * self.row_factors().to(y.dtype)
        # With a bias as what changed, so that an adapter that changes nothing leaves y as it was rounded.
        return adapted if bias is None else y + (adapted - product)

    def row_factors(self) -> torch.Tensor:
        """[out]: of each row its trained length over the one it has; 1 where nothing is adapted."""
        by_part: dict[str, torch.Tensor] = {}
        pieces = dict(zip((part for part, _ in self.parts), self.weight.split([n for _, n in self.parts])))
        for pair in self.pairs().values():
            assert pair.magnitude is not None
            rows = torch.cat([pieces[part] for part, _ in pair.parts])
            factor = pair.magnitude.float() / row_lengths(rows, *pair.sides, pair.scale)
            by_part |= dict(zip((part for part, _ in pair.parts), factor.split([n for _, n in pair.parts])))
        ones = (by_part.get(part, self.weight.new_ones(n, dtype=torch.float32)) for part, n in self.parts)
        return torch.cat(list(ones))


@torch.no_grad()
def row_lengths(weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float) -> torch.Tensor:
    """|W + scale * B A| of each row, fp32, without the product B A: |W|^2 + 2 s <W A^T, B> + s^2 <B A A^T, B>.

    Rounded as W is, and as trained lengths are kept beside it: with B zero a row has just the length it began with."""
    own = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    A, B = A.to(weight.dtype), B.to(weight.dtype)
    crossed = ((weight @ A.t()).float() * B.float()).sum(1)
    added = ((B @ (A @ A.t())).float() * B.float()).sum(1)
    lengths: torch.Tensor = (own + 2 * scale * crossed + scale**2 * added).clamp(min=SHORTEST).sqrt()
    return lengths.to(weight.dtype).float()
