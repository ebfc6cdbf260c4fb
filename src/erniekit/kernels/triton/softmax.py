"""Softmax over rows of logits, their loss and its gradient in place of the logits. Called by kernels/softmax.py.

A program takes a whole row: of 103,424 columns in 16 bit it is 202 KiB, so the rows at work stay in the cache and the
second sweep costs no memory traffic but its writing. R rows, V columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# How a row is read: DEPTH x LANES columns at a time, STAGES of them on the way; FIRST and SECOND are cache hints of the
# two sweeps; per_sm rows at work on a multiprocessor, 0: as many as fit.
LAUNCH: dict[str, Any] = dict(
    DEPTH=4, LANES=2048, STAGES=1, FIRST="evict_last", SECOND="evict_first", num_warps=8, per_sm=0
)
_LOWEST = tl.constexpr(-1.0e30)  # finite, so that a lane without columns subtracts no infinities
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["rows"])
def _rows(
    logits, targets, norms, picked, upstream, rows, row_stride, scale,
    COLUMNS: tl.constexpr, ROOM: tl.constexpr, KNOWN: tl.constexpr, GRADIENT: tl.constexpr, PER_ROW: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """ROOM: columns that may be read and written, those behind COLUMNS for nothing, so that loads stay wide.

    KNOWN: norms are read, not written, and nothing is picked. GRADIENT: logits become (softmax - onehot) * scale,
    times the row's upstream where PER_ROW."""
    within = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    row = tl.program_id(0)
    while row < rows:
        at = logits + row.to(tl.int64) * row_stride
        target = tl.load(targets + row)
        if KNOWN:
            norm = tl.load(norms + row) * _LOG2E
        else:
            chosen = tl.load(at + target, mask=(target >= 0) & (target < COLUMNS), other=0.0).to(tl.float32)
            top = tl.full([LANES], _LOWEST, tl.float32)
            total = tl.zeros([LANES], tl.float32)
            # Each lane has a maximum and a sum of its own: threads meet once a row, and exponents are 1 + 1 / DEPTH a
            # column.
            for start in tl.range(0, COLUMNS, DEPTH * LANES, num_stages=STAGES):
                column = start + within
                x = tl.load(at + column, mask=column < ROOM, other=float("-inf"), eviction_policy=FIRST)
                x = tl.where(column < COLUMNS, x.to(tl.float32) * _LOG2E, float("-inf"))
                higher = tl.maximum(top, tl.max(x, axis=0))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[None, :]), axis=0)
                top = higher
            highest = tl.max(top, axis=0)
            norm = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), axis=0))
            tl.store(norms + row, norm * _LN2)
            tl.store(picked + row, chosen)
        if GRADIENT:
            factor = scale
            if PER_ROW:
                factor = scale * tl.load(upstream + row).to(tl.float32)
            for start in tl.range(0, COLUMNS, DEPTH * LANES, num_stages=STAGES):
                column = start + within
                x = tl.load(at + column, mask=column < ROOM, other=float("-inf"), eviction_policy=SECOND)
                grad = tl.exp2(x.to(tl.float32) * _LOG2E - norm) * factor
                grad = tl.where(column == target, grad - factor, grad)
                tl.store(at + column, grad.to(logits.dtype.element_ty), mask=column < ROOM)
        row += tl.num_programs(0)


def _run(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    picked: torch.Tensor | None,
    upstream: torch.Tensor | None,
    scale: float,
    known: bool,
    gradient: bool,
    launch: dict[str, Any] | None,
) -> None:
    rows, columns = logits.shape
    assert logits.stride(1) == targets.stride(0) == norms.stride(0) == 1 or not rows
    if not rows:
        return
    options = LAUNCH | (launch or {})
    per_sm = options.pop("per_sm")
    # Rows of an odd width lie apart (head_gradients.logits_of); what is between them is unused.
    room = min(logits.stride(0), -(-columns // 16) * 16) if rows > 1 else columns
    programs = rows
    if per_sm and logits.is_cuda:
        programs = min(rows, per_sm * torch.cuda.get_device_properties(logits.device).multi_processor_count)
    _rows[(programs,)](
        logits, targets, norms, norms if picked is None else picked, norms if upstream is None else upstream,
        rows, logits.stride(0), scale,
        COLUMNS=columns, ROOM=room, KNOWN=known, GRADIENT=gradient, PER_ROW=upstream is not None, **options,
    )  # fmt: skip


def softmax_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: float = 1.0,
    gradient: bool = False,
    launch: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logsumexp and the target's logit of each row, fp32 [R]. A target outside [0, V) picks 0.

    With `gradient` the logits [R, V] are overwritten by (softmax - onehot) * scale, and so may be what lies between
    their rows.
    """
    norms = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    picked = torch.empty_like(norms)
    _run(logits, targets, norms, picked, None, scale, known=False, gradient=gradient, launch=launch)
    return norms, picked


def softmax_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    upstream: torch.Tensor | None = None,
    scale: float = 1.0,
    launch: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The logits [R, V] overwritten by (exp(logits - norms) - onehot) * scale * upstream [R], in one sweep."""
    if upstream is not None:
        upstream = upstream.contiguous()
    _run(logits, targets, norms, None, upstream, scale, known=True, gradient=True, launch=launch)
    return logits
