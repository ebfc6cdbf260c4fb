"""Loss on held-out data, weighted by tokens. Called by the evaluation hook and by `erniekit eval`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import nn

from erniekit.data.types import Batch
from erniekit.train.step import LossFunction


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: LossFunction,
    device: torch.device,
    max_batches: int = -1,
    compat: bool = False,
) -> dict[str, float]:
    """Metrics with ERNIEKit's names. compat: the mean over batches of their means."""
    start, was_training = time.perf_counter(), model.training
    model.eval()
    sums, counts, rows = [], [], 0
    for number, batch in enumerate(batches):
        if 0 <= max_batches <= number:
            break
        rows += batch.input_ids.shape[0]
        if batch.num_label_tokens:
            sums.append(loss(model, batch.to(device)))
            counts.append(batch.num_label_tokens)
    model.train(was_training)
    values = torch.stack(sums).double().tolist() if sums else []
    if compat:
        mean = sum(v / c for v, c in zip(values, counts)) / max(1, len(values))
    else:
        mean = sum(values) / max(1, sum(counts))
    seconds = time.perf_counter() - start
    return {
        "eval_loss": mean,
        "eval_ppl": math.exp(min(mean, 700.0)),
        "eval_tokens": float(sum(counts)),
        "eval_runtime": seconds,
        "eval_samples_per_second": rows / seconds,
        "eval_steps_per_second": len(values) / seconds,
    }
