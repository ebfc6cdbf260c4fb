"""Optimiser moments in 8 bit (O1) or 4 bit (O2) for checkpoints, off unless ckpt_quant_stage is set. Not bit-exact.

Used by train/save.py. Weights and fp32 master weights are always stored whole; a resume goes on from the same weights
with slightly other moments. What is stored, for a moment of shape [..., C]:

- Blocks of 128 neighbours in the last dim, a row's last block may be shorter. Each has its own scales, fp32, in
  `<name>@scales` [..., ceil(C / 128), 1 or 2]. Codes are in `<name>@int8` [..., C] or, two to a byte with the earlier
  one in the low half, in `<name>@int4` [..., C / 2], uint8 both.
- exp_avg_sq v: the scales are its block's smallest and largest v above zero. Code 0 is v = 0; codes 1 to N (255 or 15)
  are evenly spaced in log v between them, so no v is lost to zero (Adam divides by its root) and
  max(stored / v, v / stored) <= (largest / smallest) ** (1 / (2 (N - 1))).
- exp_avg m, as the update u = m / sqrt(v) it makes, of the stored v: the scale A is its block's largest |u|, the code
  round(L * u / A) with L 127 or 7, plus 128 or 8. So the next update is off by A / (2 L) at most, whatever the range
  of the gradients in a block; no sign flips. Where v is 0, m is.
- Kept as they are: tensors of one dim, rows shorter than 32 (small adapters), values that are not fp32 or not finite,
  anything but such a pair. Rows of odd length are stored in 8 bit under O2 too.

A byte or half a byte for each moment in place of four: with scales, 3.8 or 7.3 times smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from erniekit.checkpoint.blocks import local_shape, param_of, stored_boxes
from erniekit.checkpoint.slices import CHUNK, Slices, TensorFiles, fill_boxes
from erniekit.models.names import verbatim

if TYPE_CHECKING:
    from erniekit.parallel.sharding import Box, Sharding

BITS = {"O0": 32, "O1": 8, "O2": 4}
BLOCK = 128
_SHORTEST = 32
_MOMENTS = (torch.float32, torch.bfloat16)  # what they may be before

Named = tuple[str, torch.Tensor]


def compressed(tensors: Iterable[Named], stage: str) -> Iterator[Named]:
    """Moments as they are written: codes and scales in place of each pair worth it. O0 passes all through.

    A parameter's exp_avg_sq must follow its exp_avg, as the optimiser gives them.
    """
    waiting: Named | None = None
    for name, tensor in tensors:
        if waiting is not None:
            if name == _square_of(waiting[0]) and _worth_it(waiting[1], tensor):
                yield from _pair(waiting, (name, tensor), 8 if tensor.shape[-1] % 2 else BITS[stage])
                waiting = None
                continue
            yield waiting
            waiting = None
        if stage != "O0" and name.endswith("/exp_avg"):
            waiting = name, tensor
        else:
            yield name, tensor
    if waiting is not None:
        yield waiting


def _pair(first: Named, second: Named, bits: int) -> Iterator[Named]:
    lead, width = first[1].shape[:-1], first[1].shape[-1]
    m, v = (t.detach().reshape(-1, width).cpu().split(_rows_at_once(width)) for _, t in (first, second))
    squares = [_encode_squares(_blocks(part.float()), bits) for part in v]
    roots = (_decode_squares(codes, scales, bits).sqrt_() for codes, scales in squares)
    signed = [
        _encode_signed((_blocks(part.float()) / root).nan_to_num_(0.0, 0.0, 0.0), bits) for part, root in zip(m, roots)
    ]
    for (name, _), parts in ((first, signed), (second, squares)):
        codes = torch.cat([_packed(codes.flatten(1)[:, :width], bits) for codes, _ in parts])
        scales = torch.cat([scales for _, scales in parts])
        yield f"{name}@int{bits}", codes.reshape(*lead, -1)
        yield f"{name}@scales", scales.reshape(*lead, *scales.shape[1:])


class StoredState(Mapping[str, torch.Tensor]):
    """A checkpoint's `optimizer` or `master_weights`, compressed or not: each tensor is read on access.

    With a sharding, what `rank` holds of it, and no other bytes are read; without one, all of it.
    """

    def __init__(self, folder: Path, stem: str, sharding: Sharding | None = None, rank: int = 0) -> None:
        self.files, self.sharding, self.rank = TensorFiles.of_stem(folder, stem), sharding, rank
        self.is_compressed = any("@" in name for name in self.files.files)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.partition("@")[0] for name in self.files.files))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.files or f"{name}@scales" in self.files

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        boxes, shape = self._held(name)
        dtype = self.files.dtype(name) if name in self.files else torch.float32
        out = torch.zeros(shape, dtype=dtype)
        self.fill(name, boxes, out)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.files:
            return self.files.shape(name)
        codes = self.files.shape(self._codes(name))
        return (*codes[:-1], codes[-1] * 8 // self._bits(name))

    def _held(self, name: str) -> tuple[tuple[Box, ...], tuple[int, ...]]:
        if self.sharding is None:
            return (_all_of(self.shape(name)),), self.shape(name)
        boxes = self.sharding.boxes(param_of(name), self.rank)  # a moment is cut as its parameter is
        return stored_boxes(boxes, name), local_shape(self.sharding, name, self.rank)

    def fill(self, name: str, boxes: Iterable[Box], out: torch.Tensor) -> None:
        """Into a rank's own tensor, on any device."""
        if name in self.files:
            fill_boxes(self.files, verbatim(name, name), list(boxes), out)
            return
        for box in boxes:
            rows = box.global_slices[0]
            inner = prod(s.stop - s.start for s in box.global_slices[1:])
            step = _rows_at_once(inner)
            for start in range(rows.start, rows.stop, step):
                stop = min(rows.stop, start + step)
                piece = self._piece(name, (slice(start, stop), *box.global_slices[1:]))
                first = box.local_slices[0].start + start - rows.start
                out[(slice(first, first + stop - start), *box.local_slices[1:])].copy_(piece)

    def _piece(self, name: str, at: Slices) -> torch.Tensor:
        """A block of the tensor: the 128-blocks it touches, decoded, and cut to size."""
        columns = at[-1]
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        squares = self._decoded(_square_of(name), at[:-1], first, last)
        values = (
            squares if name == _square_of(name) else self._decoded(name, at[:-1], first, last).mul_(squares.sqrt_())
        )
        return values[..., columns.start - first * BLOCK : columns.stop - first * BLOCK]

    def _decoded(self, name: str, lead: Slices, first: int, last: int) -> torch.Tensor:
        """Whole 128-blocks of a tensor: squares, or updates still without their root."""
        bits, width = self._bits(name), self.shape(name)[-1]
        start, stop = first * BLOCK, min(width, last * BLOCK)
        codes = self.files.read(self._codes(name), (*lead, slice(start * bits // 8, stop * bits // 8)))
        stored = f"{name}@scales"
        scales = self.files.read(stored, (*lead, slice(first, last), slice(0, self.files.shape(stored)[-1])))
        decode = _decode_squares if name == _square_of(name) else _decode_signed
        blocks = _blocks(_unpacked(codes, bits).float())
        return decode(blocks, scales, bits).flatten(-2)[..., : stop - start]

    def _bits(self, name: str) -> int:
        return 8 if f"{name}@int8" in self.files else 4

    def _codes(self, name: str) -> str:
        return f"{name}@int{self._bits(name)}"


def _square_of(name: str) -> str:
    return name if name.endswith("_sq") else f"{name}_sq"


def _worth_it(m: torch.Tensor, v: torch.Tensor) -> bool:
    large = m.ndim >= 2 and m.shape[-1] >= _SHORTEST and m.numel() > 0 and m.shape == v.shape
    return large and all(t.dtype in _MOMENTS and bool(torch.isfinite(t).all()) for t in (m, v))


def _rows_at_once(columns: int) -> int:
    return max(1, CHUNK // (4 * max(1, columns)))


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """[..., C] -> [..., ceil(C / 128), 128], zeros behind the end."""
    return F.pad(rows, (0, -rows.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    codes = codes.to(torch.uint8)
    return codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


# Blocks [..., 128] <-> codes as floats [..., 128] and scales [..., 1 or 2].


def _encode_signed(u: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = 2 ** (bits - 1)
    largest = u.abs().amax(-1, keepdim=True)
    return (u / largest).nan_to_num_(0.0).mul_(half - 1).round_().add_(half), largest


def _decode_signed(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    return (codes - half).mul_(scales / (half - 1))


def _encode_squares(v: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    present, levels = v > 0, 2**bits - 1
    smallest = torch.where(present, v, torch.inf).amin(-1, keepdim=True).nan_to_num_(0.0, posinf=0.0)
    largest = v.amax(-1, keepdim=True)
    low, step = _log_steps(smallest, largest, levels)
    codes = v.log2().sub_(low).div_(step).round_().clamp_(0, levels - 1).add_(1.0)  # log2(0) goes to the lowest
    return codes.mul_(present), torch.cat((smallest, largest), dim=-1)


def _decode_squares(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    smallest, largest = scales[..., :1], scales[..., 1:]
    low, step = _log_steps(smallest, largest, 2**bits - 1)
    # a log and back rounds in the last bit: what was stored stays between the bounds
    values = (codes - 1.0).mul_(step).add_(low).exp2_().clamp_(smallest, largest)
    return values.mul_(codes > 0)


def _log_steps(smallest: torch.Tensor, largest: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block: log2 of its smallest value, and what one code is worth; 1 where all its values are equal."""
    low = smallest.log2().nan_to_num_(0.0, neginf=0.0)
    high = largest.log2().nan_to_num_(0.0, neginf=0.0)
    return low, torch.where(high > low, (high - low) / (levels - 1), 1.0)


def _all_of(shape: tuple[int, ...]) -> Box:
    from erniekit.parallel.sharding import Box

    whole = tuple(slice(0, n) for n in shape)
    return Box(whole, whole)
