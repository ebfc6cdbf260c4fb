"""KTO: worked by hand, against TRL's own trainer on a tiny Llama, and packed with a baseline of the whole step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.data.unpaired import UnpairedSample
from erniekit.data.unpaired_collate import collate_unpaired
from erniekit.devices import pick
from erniekit.losses.kto import METRICS, KtoSettings, kto_loss, kto_losses
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.parallel.step_metrics import StepMetrics
from erniekit.recipes.kto import Baseline
from erniekit.recipes.reference import Reference
from support.trl_recorded import REFERENCE_SCALE, gradient_norms, model, recorded


def judged(prompt: list[int], answer: list[int], desirable: bool) -> UnpairedSample:
    labels = [IGNORE] * (len(prompt) - 1) + answer + [IGNORE]
    ids, targets = (np.array(values, np.int32) for values in (prompt + answer, labels))
    return UnpairedSample(ids, targets, len(prompt), desirable)


def samples() -> list[UnpairedSample]:
    """The recorded rows, each with the answer of the row before, as TRL pairs them in a batch."""
    rows = [judged(*row) for row in recorded("kto")["rows"]]
    return [replace(row, mismatched=rows[k - 1].behind(row, 64)) for k, row in enumerate(rows)]


def engine_of(made: torch.nn.Module) -> Engine:
    device = pick("cpu")
    return Engine([(0, made)], World(), device, lambda *_: torch.zeros(()))


def prepared(batches: list[Batch], policy: torch.nn.Module) -> list[Batch]:
    reference = Reference(engine_of(model(REFERENCE_SCALE)), None, 16)
    return Baseline(reference, Reference(engine_of(policy), None, 16))(batches)


@pytest.mark.parametrize(
    ("desirable", "expected"),
    [(True, 1.5 * (1 - 1 / (1 + math.exp(-0.5)))), (False, 0.5 * (1 - 1 / (1 + math.exp(0.5))))],
    ids=["an answer to learn", "an answer to avoid"],
)
def test_an_answer_worked_by_hand(desirable, expected):
    # It has gained 3 over the reference, 1 more than the baseline; beta is a half.
    settings = KtoSettings(0.5, 1.5, 0.5)
    gained, verdict, baseline = (torch.tensor(x) for x in ([3.0], [desirable], 2.0))
    assert kto_losses(gained.double(), verdict, baseline.double(), settings).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("run", [0, 1], ids=["beta 0.1", "beta 0.5, weighted"])
@pytest.mark.parametrize("packs", [1, 2, 4], ids=["one row", "two rows", "a row each"])
def test_loss_metrics_and_gradients_are_trls(run, packs):
    told, policy, rows = recorded("kto")["runs"][run], model(), samples()
    size = len(rows) // packs
    made = [Pack(tuple(rows[k * size : (k + 1) * size]), k) for k in range(packs)]
    (batch,) = prepared([collate_unpaired(made)], policy)
    settings = KtoSettings(told["beta"], told["desirable_weight"], told["undesirable_weight"])
    metrics = StepMetrics(METRICS, torch.device("cpu"))
    loss = kto_loss(policy, batch, settings=settings, step_metrics=metrics, chunk=4) / batch.weight
    loss.backward()
    # fp32 on both sides, sums of a few tokens in another order
    assert loss.item() == pytest.approx(told["loss"], rel=2e-5)
    means = dict(zip(METRICS, metrics.reduce(None).tolist()))
    assert told["metrics"]["kl"] > 0.1  # or the baseline would not be part of this test
    for name, value in told["metrics"].items():
        assert means[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    norms = gradient_norms(policy)
    assert norms == pytest.approx(told["gradients"], rel=2e-4, abs=1e-7)


def test_the_baseline_is_of_the_whole_step_however_it_is_cut():
    policy, rows = model(), samples()
    (whole,) = prepared([collate_unpaired([Pack(tuple(rows))])], policy)
    parts = prepared([collate_unpaired([Pack((row,), k)]) for k, row in enumerate(rows)], policy)
    settings = KtoSettings(0.5)
    one = kto_loss(policy, whole, settings=settings)
    several = sum(kto_loss(policy, part, settings=settings) for part in parts)
    assert all(part.pairs.baseline == parts[0].pairs.baseline for part in parts)
    assert parts[0].pairs.baseline.item() == pytest.approx(whole.pairs.baseline.item(), rel=1e-5)
    assert several.item() == pytest.approx(one.item(), rel=1e-5)


def test_a_filler_is_not_counted_and_moves_no_baseline():
    policy, rows = model(), samples()
    filler = replace(rows[0], labels=np.full_like(rows[0].labels, IGNORE))
    alone, beside = (
        prepared([collate_unpaired([Pack(tuple(rows), 0)]), *more], policy)
        for more in ([], [collate_unpaired([Pack((filler,), 1)])])
    )
    assert beside[1].weight == 0
    assert beside[0].pairs.baseline.item() == alone[0].pairs.baseline.item()
    assert kto_loss(policy, beside[1], settings=KtoSettings()).item() == 0.0


def test_an_answer_behind_another_prompt_keeps_its_labels_and_is_cut_to_the_row():
    own, other = judged([5, 6, 7], [8, 9], True), judged([1], [2, 3, 4], False)
    mixed = other.behind(own, 64)
    assert mixed.ids.tolist() == [5, 6, 7, 2, 3, 4]
    assert mixed.labels.tolist() == [IGNORE, IGNORE, 2, 3, 4, IGNORE]
    cut: Sample = other.behind(own, 5)
    assert (cut.ids.tolist(), cut.labels.tolist()) == ([5, 6, 7, 2, 3], [IGNORE, IGNORE, 2, 3, IGNORE])
