"""Loss on held-out data, weighted by tokens. Called by the evaluation hook and by `erniekit eval`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

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
    tokens, calls, rows = engine.totals(tokens, calls, rows)
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


def evaluate_pairs(
    engine: Engine,
    batches: Iterable[Batch],
    prepare: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None,
    max_batches: int = -1,
    compat: bool = False,
) -> dict[str, float]:
    """Preference loss and rewards, means over pairs and all ranks. prepare: fills in the reference; compat: as above,
    and the ledger is told so by the loss."""
    start, was_training = time.perf_counter(), engine.model.training
    engine.train(False)
    total, means = (torch.zeros((), dtype=torch.float64, device=engine.device) for _ in range(2))
    pairs = calls = 0
    for number, batch in enumerate(batches):
        if 0 <= max_batches <= number:
            break
        ready = batch if prepare is None else prepare([batch])[0]
        loss = engine.evaluate(ready).double()
        if batch.weight:
            total += loss
            means += loss / batch.weight
            pairs += batch.weight
            calls += 1
    engine.train(was_training)
    total, means = engine.sum_losses(total), engine.sum_losses(means)
    pairs, calls = engine.totals(pairs, calls)
    names = engine.ledger.names if engine.ledger is not None else ()
    told = dict(zip(names, engine.told().tolist()))
    seconds = time.perf_counter() - start
    mean = float(means) / max(1, calls) if compat else float(total) / max(1, pairs)
    # Of a model that still answers in numbers, NaN is what nothing was added to: router losses.
    kept = {f"eval_{name}": value for name, value in told.items() if value == value or not math.isfinite(mean)}
    return {
        "eval_loss": mean,
        **kept,
        "eval_pairs": float(pairs),
        "eval_runtime": seconds,
        "eval_samples_per_second": pairs / seconds,
        "eval_steps_per_second": calls / seconds,
    }
