"""Launches AdamW over tensors whose states are stored in few bytes (triton/lean_adamw.py). Called by kernels/adamw.py,
which has their definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.kernels.launch_tables import LaunchTables, log_of, triton_type
from erniekit.kernels.position_noise import TensorPart

ALIGN = 16  # bytes read at once; and elements, as a row of 8-bit codes must begin on as many bytes
# 8 elements a thread: at 16 too few warps share a processor, and an H200 took 1.4 times as long.
ELEMENTS, WARPS = 512, 2  # of a tile
TILES = 16  # a program


class Kind(NamedTuple):
    """What one launch has in common."""

    grad: torch.dtype
    moment: torch.dtype
    weight: torch.dtype  # fp32 where the master is the weight
    mode: int  # MASTER, EXACT or NONE of triton/lean_adamw.py
    even: bool
    block: int


def update(
    tables: LaunchTables,
    key: str,
    slots: Sequence[Slot],
    rates: Rates,
    scale: torch.Tensor | None = None,
    good: torch.Tensor | None = None,
    elements: int = ELEMENTS,
) -> None:
    """Counts of updates (Slot.step) include this one already."""
    if not slots:
        return
    from erniekit.kernels.triton.lean_adamw import update as launch

    device = slots[0].grad.device
    one = tables.one(device)
    (beta1, beta2), lr = rates.betas, rates.lr
    for kind, group in _by_kind(slots).items():
        tile = max(1, elements // kind.block)
        blocks = [rows * -(-columns // kind.block) for rows, columns in (_shape(slot) for slot in group)]
        chunks = tables.chunks((key, kind), blocks, tile * TILES, device)
        if not len(chunks):
            continue
        launch[(len(chunks),)](
            tables.table((key, kind, "tensors"), [_addresses(slot) for slot in group], device),
            tables.table((key, kind, "grads"), [slot.grad.data_ptr() for slot in group], device),
            chunks,
            one if scale is None else scale,
            one if good is None else good,
            *(float(x) for x in (lr, lr * rates.weight_decay, 1 - beta1, log_of(beta1))),
            *(float(x) for x in (beta2, 1 - beta2, log_of(beta2), rates.eps)),
            *(triton_type(dtype) for dtype in kind[:3]), kind.mode, kind.even, kind.block,
            STOCHASTIC=rates.stochastic, TILE=tile, TILES=TILES, num_warps=WARPS,
        )  # fmt: skip


def _by_kind(slots: Sequence[Slot]) -> dict[Kind, list[Slot]]:
    found: dict[Kind, list[Slot]] = {}
    for slot in slots:
        slot = slot._replace(grad=slot.grad.contiguous())
        held = [t for t in (*slot[:4], slot.weight, slot.remainder) if t is not None]
        # Weights and states are this optimiser's own, or a model's parameters: in one piece.
        assert all(t.is_contiguous() for t in held)
        columns = _shape(slot)[1]
        block = slot.place.block if slot.place is not None else TensorPart().block
        even = columns % block == 0 and block % ALIGN == 0 and all(t.data_ptr() % ALIGN == 0 for t in held)
        mode = 0 if slot.master is not None else 1 if slot.remainder is not None else 2
        weight = torch.float32 if slot.weight is None else slot.weight.dtype
        kind = Kind(slot.grad.dtype, slot.average.dtype, weight, mode, even, block)
        found.setdefault(kind, []).append(slot)
    return found


def _shape(slot: Slot) -> tuple[int, int]:
    """Rows and columns. A tensor of one dim is a column where draws need its elements' numbers, which are those of
    rows; else it is one row."""
    shape = slot.average.shape
    if len(shape) == 2:
        return shape[0], shape[1]
    return (1, slot.average.numel()) if slot.place is None else (slot.average.numel(), 1)


def _addresses(slot: Slot) -> list[int]:
    place = slot.place or TensorPart()
    held = (slot.master, slot.weight, slot.remainder, slot.average, slot.square, *(slot.scales or (None,) * 3))
    places = [0 if t is None else t.data_ptr() for t in (*held, slot.step, place.rows)]
    return [*places, *_shape(slot), place.first_column, place.salt]
