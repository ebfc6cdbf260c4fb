"""Next-token cross-entropy over the trained tokens of a batch, head fused in. For train/step.py and evaluate.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.data.types import IGNORE, Batch
from erniekit.kernels.cross_entropy import CHUNK, linear_cross_entropy


def causal_loss(model: nn.Module, batch: Batch, chunk: int = CHUNK) -> torch.Tensor:
    """The SUM of token losses (fp32): the caller divides by the tokens of the whole global batch.

    chunk: rows of logits alive at once (loss_subbatch_seqlen).
    """
    hidden = model.hidden(batch.input_ids, batch.positions, batch.documents(), batch.max_doc)  # type: ignore[operator]
    return linear_cross_entropy(
        hidden.flatten(0, 1),
        model.head_weight(),  # type: ignore[operator]
        batch.labels.flatten(),
        model.head_bias_or_none(),  # type: ignore[operator]
        ignore=IGNORE,
        chunk=chunk,
    )
