"""Losses on a score head: rewards against TRL's trainer on a tiny Llama, classes against whole logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.collate import collate
from erniekit.data.preference_assemble import Answer
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.reward import ends_scored
from erniekit.data.types import IGNORE, Pack, Sample
from erniekit.losses.scores import (
    CLASS_METRICS,
    REWARD_METRICS,
    RewardSettings,
    class_loss,
    reward_loss,
    scores_of,
)
from erniekit.models.layers.decoder import Decoder
from erniekit.parallel.step_metrics import StepMetrics
from support.trl_recorded import FOLDER, gradient_norms, model, recorded

CPU = torch.device("cpu")


def scorer(weight: list[list[float]]) -> torch.nn.Module:
    """The recorded model with a score head."""
    config = replace(ModelFolder(FOLDER).config, labels=tuple(f"LABEL_{i}" for i in range(len(weight))))
    made = Decoder(config)
    state = {k: v for k, v in model().state_dict().items() if not k.startswith("head")}
    made.load_state_dict({**state, "score.weight": torch.tensor(weight)})
    return made


def pairs_batch(packs: int):
    told = recorded("reward")
    samples = []
    for (prompt, *answers), margin in zip(told["pairs"], told["margins"]):
        chosen, rejected = (Answer(ids, [True] * len(ids), []) for ids in answers)
        samples.append(ends_scored(prompt, chosen, rejected, margin, None, False))
    made = [Pack(tuple(samples))] if packs == 1 else [Pack((s,), k) for k, s in enumerate(samples)]
    return collate_pairs(made)


@pytest.mark.parametrize("run", range(3), ids=["plain", "margins", "margins and centred"])
@pytest.mark.parametrize("packs", [1, 3], ids=["packed", "a row each"])
def test_reward_loss_metrics_and_gradients_are_trls(run, packs):
    told, batch = recorded("reward")["runs"][run], pairs_batch(packs)
    made = scorer(recorded("reward")["score"])
    settings = RewardSettings(1.0 if told["with_margins"] else 0.0, told["center_rewards_coefficient"] or 0.0)
    metrics = StepMetrics(REWARD_METRICS, CPU)
    loss = reward_loss(made, batch, settings=settings, step_metrics=metrics) / batch.weight
    loss.backward()
    assert batch.weight == 3
    assert loss.item() == pytest.approx(told["loss"], rel=2e-5)  # fp32, attention in another order
    means = dict(zip(REWARD_METRICS, metrics.reduce(None).tolist()))
    assert means["rewards/accuracies"] == pytest.approx(told["metrics"]["accuracy"], abs=1e-6)
    assert means["rewards/margins"] == pytest.approx(told["metrics"]["margin"], rel=2e-5)
    assert (means["rewards/chosen"] + means["rewards/rejected"]) / 2 == pytest.approx(
        told["metrics"]["mean_reward"], rel=2e-5
    )
    norms = {**gradient_norms(made), "score.weight": float(made.score.weight.grad.norm())}
    expected = told["gradients"]
    assert {name: norms[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=1e-6)


def test_class_loss_is_cross_entropy_at_the_last_token_of_each_text_however_packed():
    rng = np.random.default_rng(0)
    made = scorer(rng.normal(size=(3, 16)).astype(np.float32).tolist())
    texts = [rng.integers(3, 40, n).astype(np.int32) for n in (5, 9, 3)]
    samples = []
    for number, ids in enumerate(texts):
        labels = np.full(len(ids), IGNORE, np.int32)
        labels[-1] = number
        samples.append(Sample(ids, labels))
    alone = [made(torch.from_numpy(ids.astype(np.int64))[None])[0, -1] for ids in texts]
    expected = F.cross_entropy(torch.stack(alone), torch.arange(3), reduction="sum")
    right = float((torch.stack(alone).argmax(-1) == torch.arange(3)).float().mean())
    for packs in ([Pack(tuple(samples))], [Pack((s,), k) for k, s in enumerate(samples)]):
        metrics = StepMetrics(CLASS_METRICS, CPU)
        loss = class_loss(made, collate(packs), step_metrics=metrics)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert metrics.reduce(None).tolist() == [pytest.approx(right)]
    assert class_loss(made, collate(packs), scale=0.5).item() == pytest.approx(expected.item() / 2, rel=1e-5)
    assert scores_of(made, collate(packs)).shape[1] == 3


def test_a_filler_gives_zero_with_a_gradient_for_every_weight():
    made = scorer([[0.1] * 16])
    batch = pairs_batch(1)
    batch.labels.fill_(IGNORE)
    batch = replace(batch, pairs=replace(batch.pairs, segment=torch.full_like(batch.pairs.segment, -1), count=0,
                                         score_delta=torch.zeros(0)))  # fmt: skip
    loss = reward_loss(made, batch, settings=RewardSettings())
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in made.parameters())
