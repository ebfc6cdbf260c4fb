"""Preference losses against ERNIEKit on Paddle: log-probabilities, nine loss types, gradients and curves (fp32).

ERNIEKit's rows are prompt | chosen | rejected, and the first rejected token is predicted from the last chosen one;
our segments and shared keys can say that too, so the very rows are replayed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import Batch
from erniekit.lora.inject import lora_state
from erniekit.losses.dpo import Answers, DpoSettings, dpo_loss, even_lengths, pair_log_probs
from support.pair_losses import dpo_losses
from support.recorded_training import pair_batch, with_adapter

TOLERANCE = 1e-4  # the fixtures' README: agreement of two fp32 stacks on losses is about 1e-5
DATA = Path(__file__).resolve().parents[2] / "data" / "paddle"
LOSS_TYPES = ["sigmoid", "hinge", "ipo", "simpo", "dpop", "kto_pair", "sppo_hard", "nca_pair", "or"]
LOSS_TYPES.append("sigmoid_normalize_logps")


@cache
def recorded() -> dict[str, Any]:
    return json.loads((DATA / "dpo.json").read_text())


def base() -> nn.Module:
    return ModelFolder(DATA / "dense_old").build()


def policy() -> nn.Module:
    return with_adapter(DATA)


@cache
def rows() -> list[Batch]:
    """All recorded rows, the reference's log-probabilities known."""
    reference, out = base(), []
    for row in recorded()["batches"]:
        batch = pair_batch(row)
        with torch.no_grad():
            known = pair_log_probs(reference, batch)
        out.append(replace(batch, pairs=replace(batch.pairs, reference=known)))
    return out


@cache
def policy_log_probs() -> list[torch.Tensor]:
    model = policy()
    with torch.no_grad():
        return [pair_log_probs(model, batch) for batch in rows()]


def lengths_of(batch: Batch) -> Answers:
    counts = torch.bincount(batch.pairs.segment[batch.pairs.segment >= 0], minlength=2 * batch.pairs.count).float()
    return Answers(counts[0::2], counts[1::2])


def test_reference_log_probs_equal_paddles():
    for k, batch in enumerate(rows()):
        known = batch.pairs.reference
        assert known[0::2].tolist() == pytest.approx(recorded()["reference_chosen_logps"][k], abs=1e-3)  # sums of ~500
        assert known[1::2].tolist() == pytest.approx(recorded()["reference_rejected_logps"][k], abs=1e-3)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_losses_of_every_recorded_type_equal_paddles(name):
    settings = DpoSettings(name.removesuffix("_normalize_logps"), normalize_logps=name.endswith("normalize_logps"))
    for batch, logps, theirs in zip(rows(), policy_log_probs(), recorded()["by_loss_type"][name]):
        sums, known, lengths = Answers(logps[0::2], logps[1::2]), batch.pairs.reference, lengths_of(batch)
        even = even_lengths(sums, lengths, settings)
        assert even.chosen.tolist() == pytest.approx(theirs["policy_chosen_logps"], abs=1e-3)
        assert even.rejected.tolist() == pytest.approx(theirs["policy_rejected_logps"], abs=1e-3)
        reference = (known[0::2], known[1::2]) if settings.needs_reference else (None, None)
        losses = dpo_losses(*sums, *reference, settings, lengths, batch.pairs.score_delta)
        assert float(losses.mean()) == pytest.approx(theirs["dpo_loss"], abs=TOLERANCE, rel=TOLERANCE)


def test_no_recorded_loss_type_is_left_out():
    assert set(LOSS_TYPES) == set(recorded()["by_loss_type"])


PLAIN = DpoSettings(normalize_logps=False)


def test_lora_gradients_equal_paddles():
    model, batch = policy(), rows()[0]
    (dpo_loss(model, batch, settings=PLAIN) / batch.pairs.count).backward()
    places = {"self_attn.qkv_proj": "attn.qkv", "self_attn.o_proj": "attn.out"}
    places |= {"mlp.up_gate_proj": "mlp.gate_up", "mlp.down_proj": "mlp.down"}
    grads = {name: param.grad for name, param in lora_state(model).items()}
    norms = recorded()["lora_sigmoid_grad_norms_batch0"]
    assert len(grads) == len(norms)
    for theirs, norm in norms.items():
        module, _, side = theirs.removeprefix("model.ernie.").rpartition(".lora_")
        ours = next(module.replace(k, v) for k, v in places.items() if k in module)
        (grad,) = (g for n, g in grads.items() if n.startswith(f"{ours}.lora.") and n.endswith(f".{side}"))
        assert float(grad.norm()) == pytest.approx(norm, rel=1e-4), theirs


@pytest.mark.parametrize("name", ["lora_curve", "full_curve_reference_is_start"])
def test_twelve_steps_follow_paddles_curve(name):
    r, model = recorded()[name], policy() if name.startswith("lora") else base()
    params = [p for p in model.parameters() if p.requires_grad]
    betas = (r["beta1"], r["beta2"])
    optimizer = torch.optim.AdamW(params, r["learning_rate"], betas, r["epsilon"], r["weight_decay"])
    losses, norms = [], []
    for step in range(len(r["loss"])):
        batch = rows()[step % 5]
        loss = dpo_loss(model, batch, settings=PLAIN) / batch.pairs.count
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in params])))
        for p in params:
            p.grad.mul_(r["max_grad_norm"] / max(norms[-1], r["max_grad_norm"]))
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(r["loss"], abs=TOLERANCE)
    assert norms == pytest.approx(r["grad_norm_before_clip"], rel=1e-3)
