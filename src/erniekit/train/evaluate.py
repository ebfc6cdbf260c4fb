"""Loss on held-out data, weighted by tokens. Called by the evaluation hook and by `erniekit eval`.

`go_on`, where given, returns before each batch whether there is still time; the same value on all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from erniekit import heartbeat
from erniekit.data.types import Batch
from erniekit.parallel.engine import Engine

GoOn = Callable[[], bool]


class Abandoned(Exception):
    """The evaluation was left between two batches: it has no result."""


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    max_batches: int = -1,
    batch_means: bool = False,
    go_on: GoOn | None = None,
) -> dict[str, float]:
    """Metrics with ERNIEKit's names, over all ranks. batch_means: the mean over batches of their means."""
    start = time.perf_counter()
    total, means = (torch.zeros((), dtype=torch.float64, device=engine.device) for _ in range(2))
    tokens = rows = calls = 0
    with _evaluating(engine):
        for batch in _while_there_is_time(batches, max_batches, go_on):
            rows += batch.rows
            loss = engine.evaluate(batch).double()
            if batch.num_label_tokens:
                total += loss
                means += loss / batch.num_label_tokens
                tokens += batch.num_label_tokens
                calls += 1
    total, means = engine.sum_losses(total), engine.sum_losses(means)
    tokens, calls, rows = engine.totals(tokens, calls, rows)
    mean = float(means) / max(1, calls) if batch_means else float(total) / max(1, tokens)
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
    batch_means: bool = False,
    go_on: GoOn | None = None,
    unit: str = "pairs",
) -> dict[str, float]:
    """Preference loss and rewards, means over pairs and all ranks. prepare: fills in the reference; batch_means: as
    above, and the loss adds to the step metrics so. unit: what a batch's weight counts, for the name of their
    number."""
    start = time.perf_counter()
    total, means = (torch.zeros((), dtype=torch.float64, device=engine.device) for _ in range(2))
    pairs = calls = 0
    with _evaluating(engine):
        for batch in _while_there_is_time(batches, max_batches, go_on):
            ready = batch if prepare is None else prepare([batch])[0]
            loss = engine.evaluate(ready).double()
            if batch.weight:
                total += loss
                means += loss / batch.weight
                pairs += batch.weight
                calls += 1
    total, means = engine.sum_losses(total), engine.sum_losses(means)
    pairs, calls = engine.totals(pairs, calls)
    names = engine.step_metrics.names if engine.step_metrics is not None else ()
    means_by_name = dict(zip(names, engine.metric_means().tolist()))
    seconds = time.perf_counter() - start
    mean = float(means) / max(1, calls) if batch_means else float(total) / max(1, pairs)
    # Where the loss is finite, NaN is a metric that nothing was added to: router losses.
    kept = {f"eval_{name}": value for name, value in means_by_name.items() if value == value or not math.isfinite(mean)}
    return {
        "eval_loss": mean,
        **kept,
        f"eval_{unit}": float(pairs),
        "eval_runtime": seconds,
        "eval_samples_per_second": pairs / seconds,
        "eval_steps_per_second": calls / seconds,
    }


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    was_training = engine.model.training
    engine.train(False)
    try:
        yield
    finally:
        engine.train(was_training)


def _while_there_is_time(batches: Iterable[Batch], max_batches: int, go_on: GoOn | None) -> Iterator[Batch]:
    """At most `max_batches` (below 0: all), each followed by a beat. Raises Abandoned as soon as `go_on` returns
    False."""
    for batch in heartbeat.each(islice(batches, max_batches if max_batches >= 0 else None)):
        if go_on is not None and not go_on():
            raise Abandoned
        yield batch
