"""Whether the products of a kind of stored weights are those of its unpacked weight, tried on a CPU. Called by
promises.py, for a kind of an installed package.

A kind may round the rows that it multiplies: what comes out is then off by a little, in no direction. One that
multiplies by other numbers than it unpacks would train a model that is not the one that is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from erniekit.kernels.grouped_gemm import product_reference
from erniekit.kernels.low_rank import Tail
from erniekit.kernels.quantised_rows import Rows, quantised, quantised_by_expert
from erniekit.kernels.stored.base import Stored, WeightKind

EXPERTS, ROWS, BEHIND = 2, 64, 7  # random rows of each expert; rows behind the last end, which are no expert's
RANK, ALPHA = 4, 0.25
# Of a row or a column of the result, by norm. With rows rounded to fp8 0.04 was measured, to four bits 0.21.
MOST_OFF = 0.25
# How far what comes out of random rows may be from 1 times what should. In fp8 0.001 was measured, in four bits 0.013.
MOST_FACTOR = 0.03


class _Trial(NamedTuple):
    method: str
    rows: Rows
    given: tuple[Any, ...]  # what else it takes
    wanted: torch.Tensor  # fp32; as many of its rows count as `random` has
    random: torch.Tensor  # bool: the rows that are; the others have one number


def broken_product(kind: WeightKind, packed: Stored, dtype: torch.dtype) -> str:
    """What a product gives otherwise, in words; empty: nothing that was tried. dtype: of rows and results.

    Methods that are WeightKind's own are right. Not tried is what the kind says a CPU cannot do. What fails there may
    work on a card, and where it does not, the run ends with its error."""
    linear, experts = (kind.why_not(torch.device("cpu"), experts) is None for experts in (False, True))
    trials = chain(_of_one(kind, packed, dtype) if linear else (), _of_experts(kind, packed, dtype) if experts else ())
    for trial in trials:
        if getattr(type(kind), trial.method) is getattr(WeightKind, trial.method):
            continue
        rows = trial.rows.clone() if isinstance(trial.rows, torch.Tensor) else trial.rows
        try:
            found = getattr(kind, trial.method)(rows, *trial.given)
        except Exception:
            continue
        if found is not None and (problem := _unlike(found, trial)):
            return f"has a `{trial.method}` that gives {problem}"
    return ""


def _of_one(kind: WeightKind, packed: Stored, dtype: torch.dtype) -> Iterator[_Trial]:
    held = kind.unpack(packed, torch.float32)
    for name, matrix, alphas in (("product", held.t(), (ALPHA,)), ("turned_product", held, ())):
        rows, random = _rows(matrix.shape[0], 1, dtype)
        wanted = rows.float() @ matrix
        yield _Trial(name, rows, (packed,), wanted, random)
        low, factor = _drawn(len(rows), RANK).to(dtype), _factors(wanted, 1, dtype)[0]
        added = low.float() @ factor.float() * (ALPHA if alphas else 1.0)
        yield _Trial(f"{name}_plus", rows, (packed, low, factor, *alphas), wanted + added, random)


def _of_experts(kind: WeightKind, packed: Stored, dtype: torch.dtype) -> Iterator[_Trial]:
    weight = packed.of_experts(EXPERTS)
    held, factor = kind.unpack(weight, torch.float32), kind.turned_factor(weight)
    for name, matrices in (("grouped", held.transpose(1, 2)), ("turned_grouped", held)):
        rows, random = _rows(matrices.shape[1], EXPERTS, dtype)
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(rows) // EXPERTS)
        rows = torch.cat([rows, _drawn(BEHIND, rows.shape[1]).to(dtype)])
        forms: list[Rows] = [rows]  # as experts' steps take them for this kind
        if name == "turned_grouped" and factor is not None:
            forms = [quantised_by_expert(rows, factor, ends)]
        elif name == "grouped" and kind.rows_in_fp8:
            forms.append(quantised(rows))
        wanted = product_reference(rows.float(), matrices, ends)
        tails: list[Tail] = [
            (_drawn(len(rows), RANK, seed).to(dtype), _factors(wanted, EXPERTS, dtype, seed)) for seed in (2, 3)
        ]
        added = torch.stack([product_reference(z.float(), by.float(), ends) for z, by in tails]).sum(0)
        given = (weight, ends, dtype)
        for form in forms:
            yield _Trial(name, form, given, wanted, random)
            yield _Trial(f"{name}_plus", form, (*given, tails, ALPHA), wanted + ALPHA * added, random)


def _unlike(found: Any, trial: _Trial) -> str:
    if not isinstance(found, torch.Tensor):
        return f"a value of type {type(found).__name__}, not a tensor"
    if found.shape != trial.wanted.shape:
        return f"{list(found.shape)}, not {list(trial.wanted.shape)}"
    got, wanted = found[: len(trial.random)].float(), trial.wanted[: len(trial.random)]
    if not bool(got.isfinite().all()):
        return "numbers that are not finite"
    likely, right = got[trial.random], wanted[trial.random]
    factor = float((likely * right).sum() / right.square().sum())
    if abs(factor - 1) > MOST_FACTOR:
        return f"{factor:.3g} times the product with what it unpacks"
    off = max(float(((got - wanted).norm(dim=d) / wanted.norm(dim=d).clamp(min=1e-3)).max()) for d in (0, 1))
    return f"another product than that with what it unpacks: a row or column is {off:.0%} off" if off > MOST_OFF else ""


def _rows(width: int, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """For each expert one row for each column, with a 1 there, which no rounding changes; then random ones."""
    both = [torch.cat([torch.eye(width), _drawn(ROWS, width, seed)]) for seed in range(experts)]
    random = (torch.arange(width + ROWS) >= width).repeat(experts)
    return torch.cat(both).to(dtype), random


def _factors(wanted: torch.Tensor, experts: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """[experts, RANK, width]: updates by ALPHA of them are about as large as the product."""
    size: torch.Tensor = wanted.square().mean(0).sqrt() / (ALPHA * RANK**0.5)
    drawn: torch.Tensor = _drawn(experts * RANK, wanted.shape[1], 9 + seed) * size
    return drawn.to(dtype).view(experts, RANK, -1)


def _drawn(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
