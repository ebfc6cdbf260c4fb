"""Loss on held-out data, weighted by tokens. Called by the evaluation hook and by `erniekit eval`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch

from erniekit.data.types import Batch
from erniekit.parallel.engine import Engine


def evaluate(engine: Engine, batches: Iterable[Batch], max_batches: int = -1, compat: bool = False) -> dict[str, float]:
    """Metrics with ERNIEKit's names, over all ranks. compat: the mean over batches of their means."""
    start, was_training = time.perf_counter(), engine.model.training
    engine.train(False)
    total, means = (torch.zeros((), dtype=torch.float64, device=engine.device) for _ in range(2))
    tokens = rows = calls = 0
    for number, batch in enumerate(batches):
        if 0 <= max_batches <= number:
            break
        rows += batch.input_ids.shape[0]
        loss = engine.evaluate(batch).double()
        if batch.num_label_tokens:
            total += loss
            means += loss / batch.num_label_tokens
            tokens += batch.num_label_tokens
            calls += 1
    engine.train(was_training)
    total, means = engine.sum_losses(total), engine.sum_losses(means)
    tokens, calls, rows = (engine.total_tokens(n) for n in (tokens, calls, rows))
    mean = float(means) / max(1, calls) if compat else float(total) / max(1, tokens)
    seconds = time.perf_counter() - start
    return {
        "eval_loss": mean,
        "eval_ppl": math.exp(min(mean, 700.0)),
        "eval_tokens": float(tokens),
        "eval_runtime": seconds,
        "eval_samples_per_second": rows / seconds,
        "eval_steps_per_second": calls / seconds,
    }
