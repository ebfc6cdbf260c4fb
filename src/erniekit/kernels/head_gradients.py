"""A head's rows and gradients, a chunk at a time: which rows are trained, their logits, and dx, dW, db as they add up.

Called by cross_entropy.py and token_losses.py. T tokens, n trained ones, R rows of a chunk, H hidden,
V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from erniekit import capabilities
from erniekit.kernels import quack_gemm
from erniekit.kernels.selection import HeadFacts, chosen
from erniekit.kernels.softmax import in_place, softmax_gradient

CHUNK = 2048  # rows of fp32 logits alive at once; 2048 x 103,424 = 0.8 GiB
ALIGNED = 64  # logits' rows start at multiples of this many columns, which products in 16 bit need


class Shard(NamedTuple):
    """Where a head's weight lies in a wider one, of which other ranks have the rest."""

    start: int  # its first row
    # The parts' logsumexp and target logits (0 where the target is not) [R] -> whole rows' logsumexp and losses [R].
    join: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def graphless(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Inside a Function `needs_input_grad` ignores no_grad: without this, evaluation would form gradients."""
    if torch.is_grad_enabled():
        return tensors
    return tuple(None if t is None else t.detach() for t in tensors)


def trained_rows(labels: torch.Tensor, ignore: int, count: int | None) -> torch.Tensor | None:
    """Places [n] of the labels [T] that are trained; None: all are.

    count: how many, where the host has it; without it the host waits for the device.
    """
    trained = labels != ignore
    if count is None:
        places = trained.nonzero().squeeze(-1)
        return None if places.numel() == labels.numel() else places
    # Too small a count would leave tokens out in silence.
    torch._assert_async(trained.sum() == count, f"{count} trained tokens were counted, the labels have another number")
    return None if count == labels.numel() else torch.nonzero_static(trained, size=count).squeeze(-1)


def at_places(
    hidden: torch.Tensor, labels: torch.Tensor, places: torch.Tensor | None, shard: Shard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trained rows [n, H] and their targets [n], counted from the shard's first row."""
    if places is not None:
        hidden, labels = hidden.index_select(0, places), labels.index_select(0, places)
    return hidden, labels if shard is None else labels - shard.start


def spans(rows: int, chunk: int, like: torch.Tensor) -> list[slice]:
    """Chunks of rows. Logits that are overwritten in 16 bit take half the memory of fp32 ones: twice the rows, and of
    even size, as a small last chunk costs a product nearly what a full one does."""
    if not in_place(like.device):
        return [slice(at, min(at + chunk, rows)) for at in range(0, rows, chunk)]
    if like.element_size() < 4:
        chunk *= 2
    each = -(-rows // -(-rows // chunk)) if rows else 1
    each = min(chunk, -(-each // 128) * 128)
    return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]


def logits_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[R, V] that may be overwritten."""
    columns = weight.shape[0]
    if not in_place(x.device) or columns % ALIGNED == 0:
        facts = HeadFacts(x.device, x.dtype, columns, bias is not None)
        if quack_gemm.takes_logits(x, weight) and chosen("head", facts) == "quack":
            return quack_gemm.logits(x, weight)
        return F.linear(x, weight, bias)
    room = x.new_empty(x.shape[0], -(-columns // ALIGNED) * ALIGNED)[:, :columns]
    if bias is None:
        return torch.mm(x, weight.t(), out=room)
    return torch.addmm(bias, x, weight.t(), out=room)


class HeadGradients:
    """Only those that are needed are formed. dW is summed in fp32; of a single chunk there is nothing to sum."""

    def __init__(
        self,
        needed: Sequence[bool],
        rows: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunks: int,
    ) -> None:
        self.weight, self.bias, self.single = weight, bias, chunks == 1
        want_x, self.want_w, want_b = needed[:3]
        self.x = weight.new_empty(rows, weight.shape[1]) if want_x else None
        self.w: torch.Tensor | None = None
        self.b = torch.zeros_like(bias, dtype=torch.float32) if want_b and bias is not None else None

    @property
    def wanted(self) -> bool:
        return self.x is not None or self.want_w or self.b is not None

    def add(self, span: slice, grad: torch.Tensor, x: torch.Tensor) -> None:
        """grad [R, V] of the logits, in fp32 or x's dtype; x [R, H]."""
        low = grad.to(x.dtype)
        if self.x is not None:
            torch.mm(low, self.weight, out=self.x[span])
        if self.want_w:
            self._add_to_weight(low.t(), x)
        if self.b is not None:
            self.b += grad.sum(0, dtype=torch.float32)

    def _add_to_weight(self, low_VR: torch.Tensor, x: torch.Tensor) -> None:
        # 16-bit products that leave the tensor cores in fp32
        wide = x.is_cuda and x.dtype != torch.float32 and capabilities.has("wide")
        if self.w is None:
            fp32_sum = wide and not self.single
            self.w = torch.mm(low_VR, x, out_dtype=torch.float32) if fp32_sum else low_VR @ x
            if not self.single:
                self.w = self.w.float()
        elif wide:
            torch.addmm(self.w, low_VR, x, out_dtype=torch.float32, out=self.w)
        else:
            self.w += (low_VR @ x).float()

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        if self.want_w and self.w is None:  # no row was trained
            self.w = torch.zeros_like(self.weight)
        return self.x, self.w, self.b


def keep_formed(ctx: Any, formed: HeadGradients, tokens: int, places: torch.Tensor | None, scale: float | None) -> None:
    """At the end of a Function's forward that has formed its gradients; with a scale they are final."""
    grad_x, grad_w, grad_b = formed.finish()
    ctx.tokens, ctx.final, ctx.handed_out = tokens, scale is not None, False
    ctx.dtypes = (formed.weight.dtype, None if formed.bias is None else formed.bias.dtype)
    if ctx.final:
        grad_w, grad_b = (None if g is None else g.to(dtype) for g, dtype in zip((grad_w, grad_b), ctx.dtypes))
    ctx.save_for_backward(places, grad_x, grad_w, grad_b)


def formed_gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """dx, dW, db, in that Function's backward."""
    places, grad_x, grad_w, grad_b = ctx.saved_tensors
    if ctx.final:
        # The caller may add to these very tensors.
        if ctx.handed_out:
            raise RuntimeError("a loss with a scale goes backward once; call it without scale to do so again")
        ctx.handed_out = True
        torch._assert_async(upstream == 1, "a loss with a scale was scaled again; give it the whole scale instead")
    else:
        grad_x = times(grad_x, upstream, None)
        grad_w, grad_b = (times(g, upstream, dtype) for g, dtype in zip((grad_w, grad_b), ctx.dtypes))
    return spread(grad_x, places, ctx.tokens), grad_w, grad_b


def keep_row_gradients(
    ctx: Any,
    by_row: HeadGradients,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    norms: torch.Tensor,
    places: torch.Tensor | None,
    chunk: int,
    tokens: int,
) -> None:
    """At the end of the forward of a Function that gives each row [n] its own loss: the rows' gradients if they could
    be formed, else what backward needs to form them."""
    ctx.tokens, ctx.chunk, ctx.formed = tokens, chunk, by_row.wanted
    if by_row.wanted:
        ctx.save_for_backward(places, by_row.x)
    else:
        ctx.save_for_backward(places, x, by_row.weight, bias, targets, norms)


def row_gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """dx, dW, db, in that Function's backward; upstream [n]."""
    if ctx.formed:
        places, grad_x = ctx.saved_tensors
        return spread(times(grad_x, upstream.float()[:, None], None), places, ctx.tokens), None, None
    places, x_all, weight, bias, targets, norms = ctx.saved_tensors
    parts = spans(x_all.shape[0], ctx.chunk, x_all)
    formed = HeadGradients(ctx.needs_input_grad, x_all.shape[0], weight, bias, len(parts))
    for span in parts:
        x = x_all[span]
        grad = softmax_gradient(logits_of(x, weight, bias), targets[span], norms[span], upstream[span])
        formed.add(span, grad, x)
        del grad  # before the next chunk needs the room
    grad_x, grad_w, grad_b = formed.finish()
    grad_w = None if grad_w is None else grad_w.to(weight.dtype)
    grad_b = None if grad_b is None else grad_b.to(bias.dtype)
    return spread(grad_x, places, ctx.tokens), grad_w, grad_b


def times(grad: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """grad * factor in dtype, rounded once, in one pass. A 0-dim factor would be rounded to grad's bf16:
    1 / tokens then scales every gradient below the head by up to 0.4 %."""
    if grad is None:
        return None
    if not factor.dim():
        factor = factor.view([1] * grad.dim())
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))


def spread(rows: torch.Tensor | None, places: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """[n, H] at their places in [T, H], zero elsewhere."""
    if rows is None or places is None:
        return rows
    return rows.new_zeros(tokens, rows.shape[1]).index_copy_(0, places, rows)
