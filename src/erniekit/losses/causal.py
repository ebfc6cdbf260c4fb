"""Next-token cross-entropy over the trained tokens of a batch, head fused in. Called through recipes/stage.py."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.data.types import IGNORE, Batch
from erniekit.kernels.cross_entropy import CHUNK


def causal_loss(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    chunk: int = CHUNK,
    scale: float | None = None,
) -> torch.Tensor:
    """The SUM of token losses (fp32): the caller divides by the tokens of the whole global batch, or gives that as
    `scale` before, which is quicker; backward must then start from this loss.

    hidden: what the stage before gave, in a pipeline. chunk: rows of logits alive at once (loss_subbatch_seqlen).
    """
    return model(
        batch.input_ids if hidden is None else hidden,
        batch.positions,
        batch.documents(),
        batch.max_doc,
        labels=batch.labels,
        ignore=IGNORE,
        chunk=chunk,
        more=batch.more(),
        scale=scale,
    )
