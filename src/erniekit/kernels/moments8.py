"""AdamW's two moments in 8 bit, in blocks of neighbours inside a row. Used by kernels/adamw.py (`optim_states: 8bit`);
kernels/triton/lean_adamw.py does the same on a card.

Of a block of up to 256 columns:

- exp_avg_sq v: 255 values evenly spaced in log v between the largest and the smallest (at most 2**48 apart; smaller
  ones are raised to that). Code 0 is v = 0. Scales: the largest, and log2(largest / smallest).
- exp_avg m, as the update u = m / sqrt(v) that it makes, of the stored v: 255 even steps of the largest |u|. So an
  update is off by 1/254 of the block's largest at most, however far apart the gradients of the block are.

Both are rounded up or down by chance so that the mean is right: to the nearest, 0.999 v is the code of v again, and a
second moment would only follow its block's largest. A block never crosses a row, so cutting a tensor by rows (experts,
sharding, most of tensor parallelism) cuts its codes and scales alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from erniekit.kernels.position_noise import high16, low16

BLOCK = 256
SHORTEST = 64  # columns; tensors with fewer, and those of one dim, keep wide moments: they are few
TINY = 2.0**-126  # below it v is 0: next to any epsilon it is
HUGE = 3e38  # v is at most this: an infinite one would make its whole block infinite
SPAN = 48.0  # log2 of how far apart the values of a block are at most
LEAST_SPAN = 2.0**-8  # what they count as apart at least: a step between codes is never 0
CODES = 254  # steps between 255 codes
HALF = 127


class Scales(NamedTuple):
    """fp32 [rows, blocks] each."""

    update: torch.Tensor  # the largest |m / sqrt(v)|
    largest: torch.Tensor  # v
    span: torch.Tensor  # log2 of the largest v over the smallest


def fits8(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[1] >= SHORTEST


def encode(
    m: torch.Tensor, v: torch.Tensor, drawn: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, Scales]:
    """m, v: fp32 [R, C]; drawn: position_noise.draws for moments. -> codes uint8 [R, C] of both, and their scales."""
    columns = m.shape[1]
    m, v = _blocks(m, block), _blocks(v.clamp(max=HUGE), block)
    chance_v, chance_u = (_blocks(half(drawn).float() / 65536, block) for half in (high16, low16))
    present = v >= TINY
    largest = torch.where(present, v, 0.0).amax(-1, keepdim=True)
    smallest = torch.where(present, v, HUGE).amin(-1, keepdim=True)
    span = torch.where(largest > 0, -(smallest / largest).log2(), 0.0).clamp(LEAST_SPAN, SPAN)
    step = span / CODES
    below = torch.where(present, -(v / largest).log2() / step, 0.0).clamp(0.0, CODES).floor()
    up, down = (_log_value(largest, step, below + k) for k in (0, 1))
    rises = torch.where(present, (v - down) / (up - down), 1.0)
    below = (below + (chance_v >= rises)).clamp(max=CODES)
    root = _log_value(largest, step, below).sqrt()
    u = torch.where(present, m / root, 0.0)
    most = u.abs().amax(-1, keepdim=True)
    steps = torch.where(most > 0, u * (HALF / most), 0.0)
    code_u = (steps + chance_u).floor().clamp(-HALF, HALF) + (HALF + 1)
    code_v = torch.where(present, 255 - below, 0.0)
    codes = [code.to(torch.uint8).flatten(-2)[:, :columns].contiguous() for code in (code_u, code_v)]
    return codes[0], codes[1], Scales(*(scale.squeeze(-1) for scale in (most, largest, span)))


def decode(code_u: torch.Tensor, code_v: torch.Tensor, scales: Scales, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> m, v, fp32 [R, C], each in one piece: torch's fused update reads memory past a row's end otherwise."""
    columns = code_u.shape[1]
    most, largest, span = (scale.unsqueeze(-1) for scale in scales)
    cu, cv = _blocks(code_u.float(), block), _blocks(code_v.float(), block)
    v = torch.where(cv > 0, _log_value(largest, span / CODES, 255 - cv), 0.0)
    m = (cu - (HALF + 1)) * (most / HALF) * v.sqrt()
    return m.flatten(-2)[:, :columns].contiguous(), v.flatten(-2)[:, :columns].contiguous()


def _log_value(largest: torch.Tensor, step: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = largest * (-(step * below)).exp2()
    return value


def _blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """[R, C] -> [R, ceil(C / block), block], zeros behind the end."""
    blocks: torch.Tensor = F.pad(rows, (0, -rows.shape[-1] % block)).unflatten(-1, (-1, block))
    return blocks
