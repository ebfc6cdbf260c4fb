"""Products with frozen weights in fp8 (e4m3), a scale for each row of both sides. Called by lora/frozen.py and by the
ops that add adapters to such weights.

An H200 does these 1.3 to 1.5 times as fast as bf16; a product is off by 3.7 % (norm) where bf16 is off by 0.2 %. Other
devices run the definition: both sides turned back into fp32 and multiplied. R rows, E experts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from erniekit.kernels.available import has_triton

HIGHEST = 448.0  # of e4m3
LEAST = 1e-30  # a row's largest number counts as this at least: rows of zeros stay zeros, and 1 / scale stays finite
ALIGNED = 16  # widths of a weight are multiples of this: what the tensor cores' kernels load
OLDEST = (8, 9)  # NVIDIA's capability: the first with fp8
GROUPED = (9, 0)  # the only one whose grouped products torch has in fp8 with scales by row

_HAS_TRITON = has_triton()
Scaled = tuple[torch.Tensor, torch.Tensor]  # fp8 [..., K] and fp32 [..., 1]


class Fp8Weight(NamedTuple):
    """A matrix [out, in], or one for each expert, held twice: both products read along what they sum over. The two
    together take the bytes of one in bf16."""

    rows: torch.Tensor  # fp8 [.., out, in]: for y = x W^T
    row_scale: torch.Tensor  # fp32 [.., out, 1]
    columns: torch.Tensor  # fp8 [.., in, out]: for dx = dy W
    column_scale: torch.Tensor  # fp32 [.., in, 1]


def why_not(device: torch.device, experts: bool) -> str | None:
    """In a user's words; None: it runs here. A CPU runs the definition."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        return "fp8 products run on NVIDIA cards (and, slowly, on a CPU)"
    major, minor = capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"
    if capability < OLDEST:
        return f"{name} has no fp8; Hopper has, capability 9.0"
    if experts and capability != GROUPED:
        return f"this torch has fp8 products of experts for Hopper (capability 9.0) alone, not for {name}"
    absent = [op for op in ("_scaled_mm", "_scaled_grouped_mm") if not hasattr(torch, op)]
    return f"torch {torch.__version__} has no {absent[0]}" if absent else None


def quantised(x: torch.Tensor) -> Scaled:
    """x [..., K] -> fp8 [..., K] and its rows' scales, fp32 [..., 1]: x is about fp8 * scale. What is not finite stays
    so in the product."""
    if x.is_cuda and _HAS_TRITON:
        from erniekit.kernels.triton import fp8_rows

        return fp8_rows.quantise(x)
    return reference(x)


def reference(x: torch.Tensor) -> Scaled:
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return (x.float() * (HIGHEST / most)).clamp(-HIGHEST, HIGHEST).to(torch.float8_e4m3fn), most / HIGHEST


def dequantised(x8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x8.float() * scale


def fits(weight: torch.Tensor) -> bool:
    """Whether a weight [.., out, in] is of widths that the kernels take."""
    return all(n % ALIGNED == 0 for n in weight.shape[-2:])


@torch.no_grad()
def fp8_weight(weight: torch.Tensor) -> Fp8Weight:
    """weight [out, in] or [E, out, in]; beside the answer only one expert's copy is made."""
    *experts, out, width = weight.shape
    rows, row_scale = quantised(weight)
    columns = torch.empty(*experts, width, out, dtype=rows.dtype, device=rows.device)
    column_scale = torch.empty(*experts, width, 1, dtype=torch.float32, device=rows.device)
    each = (t.reshape(-1, *t.shape[-2:]) for t in (weight, columns, column_scale))
    for matrix, turned, scale in zip(*each):
        values, scales = quantised(matrix.t().contiguous())
        turned.copy_(values)
        scale.copy_(scales)
    return Fp8Weight(rows, row_scale, columns, column_scale)


def product(
    x8: torch.Tensor, xs: torch.Tensor, w8: torch.Tensor, ws: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """x8 [R, K], xs [R, 1], w8 [N, K], ws [N, 1] -> x w^T [R, N]."""
    if not x8.is_cuda:
        return (dequantised(x8, xs) @ dequantised(w8, ws).t()).to(dtype)
    if not x8.shape[0]:
        return torch.empty(0, w8.shape[0], dtype=dtype, device=x8.device)
    # Without fast accumulation the product is as slow as bf16's, or slower.
    out = torch._scaled_mm(
        x8, w8.t(), scale_a=xs, scale_b=ws.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out.to(dtype)


def grouped(
    rows8: torch.Tensor,
    rs: torch.Tensor,
    w8: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """rows8 [R, K] sorted by expert, rs [R, 1], w8 [E, N, K], ws [E, N, 1], ends int32 [E] (one past each expert's last
    row) -> [R, N]. Rows past the last end are nobody's: undefined on a card, zeros elsewhere."""
    if not rows8.is_cuda:
        out = rows8.new_zeros(rows8.shape[0], w8.shape[1], dtype=dtype)
        bounds = [0, *ends.tolist()]
        for e, (a, b) in enumerate(pairwise(bounds)):
            out[a:b] = product(rows8[a:b], rs[a:b], w8[e], ws[e], dtype)
        return out
    if not rows8.shape[0]:
        return torch.empty(0, w8.shape[1], dtype=dtype, device=rows8.device)
    answers = torch._scaled_grouped_mm(
        rows8, w8.transpose(1, 2), rs.view(-1), ws.squeeze(-1), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return answers.to(dtype)


def fp8_linear(x: torch.Tensor, weight: Fp8Weight, ends: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] -> x W^T [..., out]; ends: x [R, in] is sorted by expert, and each has its W. The gradient goes to x
    alone, as if nothing had been rounded."""
    return torch.ops.erniekit.fp8_linear(x, *weight, ends)


# The gradient of x is the same op with the weight's two forms exchanged, so there is no second one.
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_LIBRARY.define(
    "fp8_linear(Tensor x, Tensor rows, Tensor row_scale, Tensor columns, Tensor column_scale, Tensor? ends) -> Tensor"
)


def _forward(
    x: torch.Tensor,
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    columns: torch.Tensor,
    column_scale: torch.Tensor,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    x8, xs = quantised(x.reshape(-1, x.shape[-1]))
    if ends is not None:
        return grouped(x8, xs, rows, row_scale, ends, x.dtype)
    return product(x8, xs, rows, row_scale, x.dtype).view(*x.shape[:-1], rows.shape[0])


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("fp8_linear", _forward, _device)


@torch.library.register_fake("erniekit::fp8_linear")
def _(x: torch.Tensor, rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows.shape[-2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, row_scale, columns, column_scale, ends = ctx.saved_tensors
    turned = Fp8Weight(columns, column_scale, rows, row_scale)
    return fp8_linear(grad, turned, ends), None, None, None, None, None


torch.library.register_autograd("erniekit::fp8_linear", _gradient, setup_context=_keep)
