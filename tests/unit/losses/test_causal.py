"""The loss of a batch: divided before or after, with counts from the host, over parts of sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from erniekit.data.types import IGNORE, Batch
from erniekit.losses.causal import causal_loss
from erniekit.models.layers.decoder import Decoder
from erniekit.parallel.context import split
from unit.models.test_mtp import batch, model


def gradients(built: Decoder) -> list[torch.Tensor]:
    return [param.grad for param in built.parameters() if param.grad is not None]


def test_a_scale_given_before_is_a_division_after_for_the_further_losses_too() -> None:
    early, late = model(), model()
    loss = causal_loss(early, batch(), scale=1 / 30)
    loss.backward()
    expected = causal_loss(late, batch()) / 30
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert len(gradients(early)) == len(gradients(late))
    for ours, theirs in zip(gradients(early), gradients(late)):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)  # sums that cancel
    (ours,), (theirs,) = early.records or [], late.records or []
    for depth in range(2):
        torch.testing.assert_close(ours["mtp_loss", depth][0], theirs["mtp_loss", depth][0])


def counts(of: Batch) -> tuple[int, ...]:
    assert of.future is not None
    return (of.num_label_tokens, *of.future.trained)


def test_a_batch_knows_its_trained_labels_whole_or_cut() -> None:
    whole = batch()
    assert whole.future is not None
    assert counts(whole) == (int((whole.labels != IGNORE).sum()), *(whole.future.labels != IGNORE).sum((0, 1)).tolist())
    parts = [split(whole, rank, 2) for rank in range(2)]
    assert tuple(map(sum, zip(*map(counts, parts)))) == counts(whole)
    assert whole.more().trained == whole.num_label_tokens


def test_a_batch_whose_count_is_not_its_labels_is_refused() -> None:
    with pytest.raises(RuntimeError, match="trained tokens were counted"):
        causal_loss(model(), replace(batch(), num_label_tokens=3))
