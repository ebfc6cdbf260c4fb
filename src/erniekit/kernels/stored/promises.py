"""Whether a kind of stored weights keeps what every kind promises (docs/kernels.md): tried on a small matrix when a
kind of an installed package is loaded. Called by kernels/stored/__init__.py.

A kind that breaks one would give other numbers on two ranks than on one, or after a merged file is packed again; or
train another model than the one that is written (product_promises.py).
"""

from __future__ import annotations

import torch

from erniekit.kernels.stored.base import SLOTS, Stored, WeightKind
from erniekit.kernels.stored.product_promises import broken_product
from erniekit.weight_kinds import PLAIN

SIDES = (64, 128, 256, 512)  # of the matrices tried: a kind that fits none of them, nor twice their columns, is not


def broken_promise(kind: WeightKind) -> str:
    """What it does otherwise, in words; empty: nothing that was tried."""
    side = next((w for w in SIDES if kind.fits(w, w) and kind.fits(w, 2 * w) and kind.fits(2 * w, 2 * w)), None)
    if side is None:
        return ""
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(2 * side, 2 * side, generator=torch.Generator().manual_seed(0))
        weight[:side] *= 4  # so that rows differ in what their scales are made from
        weight = weight.to(dtype)
        if problem := _problem(kind, weight, side):
            return f"{problem} (weights in {str(dtype).removeprefix('torch.')})"
    return ""


def _problem(kind: WeightKind, weight: torch.Tensor, side: int) -> str:
    packed = kind.pack(weight.clone())
    if kind.shape(packed) != weight.shape:
        return ""  # packing a layer says so, with its sizes
    for slot, tensor in zip(SLOTS, packed[:3]):
        if tensor is not None and (not tensor.dim() or tensor.shape[0] != weight.shape[0]):
            return (
                f"packs {weight.shape[0]} rows as a `{slot}` of {list(tensor.shape)}: its first dimension must be rows"
            )
    held = kind.unpack(packed, weight.dtype)
    if held.shape != weight.shape or held.dtype != weight.dtype:
        return f"unpacks {_said(weight)} as {_said(held)}"
    if not bool(held.isfinite().all()):
        return "unpacks numbers that are not finite"
    if not _equal(kind, kind.pack(held.clone()), held):
        return "packs what it unpacked as other numbers: merged weights would differ from those that were trained on"
    if not _equal(kind, kind.pack(weight[side:].clone()), held[side:]):
        return "packs rows otherwise without the rows before them: a rank with some of them would compute other numbers"
    by_expert = kind.unpack(packed.of_experts(2), weight.dtype)
    if not torch.equal(by_expert, held.unflatten(0, (2, -1))):
        return "unpacks tensors of two experts [2, out, ...] otherwise than the same rows end to end"
    if problem := _columns_apart(kind, weight, held, side):
        return problem
    if packed.kind == kind.name:
        return broken_product(kind, packed, weight.dtype)
    if packed.kind == PLAIN and not (packed.data.shape == held.shape and torch.equal(packed.data.to(held.dtype), held)):
        return f"packs a `Stored` without `kind={kind.name!r}`: it would be multiplied as a plain weight"
    return ""  # another kind's products


def _columns_apart(kind: WeightKind, weight: torch.Tensor, held: torch.Tensor, side: int) -> str:
    """Two ranks with half the columns each: what they give `agree`, and what they make of the larger of each."""
    halves = weight.split(side, dim=1)
    given: list[torch.Tensor] = []

    def note(values: torch.Tensor) -> torch.Tensor:
        given.append(values)
        return values

    for half in halves:
        kind.pack(half.clone(), note)
    calls = len(given) // 2
    largest: list[torch.Tensor] = []

    def agree(values: torch.Tensor) -> torch.Tensor:
        return largest.pop(0) if largest else values

    for half, part in zip(halves, held.split(side, dim=1)):
        largest += [torch.maximum(one, two) for one, two in zip(given[:calls], given[calls:])]
        if not _equal(kind, kind.pack(half.clone(), agree), part):
            return "packs half the columns of a row otherwise than the whole row, whatever `agree` answers"
    return ""


def _equal(kind: WeightKind, packed: Stored, held: torch.Tensor) -> bool:
    return torch.equal(kind.unpack(packed, held.dtype), held)


def _said(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
