"""What a loss needs of rows of logits: logsumexp, the target's logit, and the gradient softmax - onehot.

Called by cross_entropy.py, token_losses.py and head_gradients.py. On a card one Triton kernel writes the gradient over
the logits; elsewhere it is plain torch in fp32. R rows, V columns; a target outside [0, V) belongs to another rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from erniekit.kernels.available import has_triton


def in_place(device: torch.device) -> bool:
    """Whether gradients are written over the logits of this device, in their dtype."""
    return device.type == "cuda" and has_triton()


def loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float | None, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The SUM of the rows' losses (fp32) and, if wanted, its gradient [R, V] times scale. Logits are spent."""
    if in_place(logits.device):
        from erniekit.kernels.triton.softmax import softmax_rows

        norms, picked = softmax_rows(logits, targets, 1.0 if scale is None else scale, gradient)
        return (norms - picked).sum(), logits if gradient else None
    logits = logits.float()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    if not gradient:
        return loss, None
    grad = logits.softmax(-1)
    grad[torch.arange(targets.shape[0], device=targets.device), targets] -= 1.0
    return loss, grad if scale is None else grad.mul_(scale)


def norms_and_targets(
    logits: torch.Tensor, targets: torch.Tensor, gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logsumexp and the target's logit (0 where it is not here) of each row, fp32 [R]; if wanted softmax - onehot, for
    which the logits are spent."""
    if in_place(logits.device):
        from erniekit.kernels.triton.softmax import softmax_rows

        norms, picked = softmax_rows(logits, targets, gradient=gradient)
        return norms, picked, logits if gradient else None
    logits = logits.float()
    if not logits.shape[1]:  # more ranks than vocabulary leave some without
        norms = logits.new_full((logits.shape[0],), float("-inf"))
        return norms, torch.zeros_like(norms), logits if gradient else None
    here, index = _place(targets, logits.shape[1])
    norms = logits.logsumexp(-1)
    picked = logits.gather(1, index).squeeze(1).masked_fill(~here, 0.0)
    return norms, picked, softmax_gradient(logits, targets, norms) if gradient else None


def softmax_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    norms: torch.Tensor,
    upstream: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """(exp(logits - norms) - onehot) * upstream [R] or * scale; norms may be those of a wider row. Logits are spent."""
    if in_place(logits.device):
        from erniekit.kernels.triton.softmax import softmax_gradient_

        return softmax_gradient_(logits, targets, norms, upstream, 1.0 if scale is None else scale)
    grad = logits.float().sub_(norms[:, None]).exp_()
    if not logits.shape[1]:
        return grad
    here, index = _place(targets, logits.shape[1])
    factor = here.float()
    if upstream is not None:
        grad, factor = grad.mul_(upstream.float()[:, None]), factor * upstream.float()
    if scale is not None:
        grad, factor = grad.mul_(scale), factor * scale
    return grad.scatter_add_(1, index, -factor[:, None])


def _place(targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are here [R], and a column for each [R, 1]."""
    return (targets >= 0) & (targets < columns), targets.clamp(0, columns - 1)[:, None]
