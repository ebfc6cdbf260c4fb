"""Recorded batches, adapters and optimiser settings as our own objects, and the steps that draw a recorded curve.

Called by tests/parity and tests/unit/losses. The files behind them: recorded.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE, Batch, Pairs, SharedKeys
from erniekit.devices import pick
from erniekit.lora.adapter import load_adapter
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.inject import inject
from erniekit.losses.causal import causal_loss
from erniekit.models.names import Entry
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.train.step import TrainStep

Numbers = dict[str, torch.Tensor]


def with_adapter(paddle: Path, family: str = "dense") -> nn.Module:
    """The base with the recorded adapter in place, as `lora_path` puts it there: one A over fused weights."""
    model = ModelFolder(paddle / f"{family}_old").build()
    adapter = read_adapter(paddle / f"{family}_lora", model)
    inject(model, adapter.settings(model, shared_a=True), seed=0)
    load_adapter(model, adapter)
    return model


# --- batches ---


def plain_batch(ids: torch.Tensor, labels: torch.Tensor) -> Batch:
    """Every row one document, nothing packed."""
    B, L = ids.shape
    bounds = torch.arange(0, B * L + 1, L, dtype=torch.int32)
    places = torch.arange(L).expand(B, L)
    return Batch(ids.long(), labels.long(), places, bounds, L, int((labels != IGNORE).sum()), packed=False)


def pair_batch(recorded: dict[str, Any]) -> Batch:
    """A recorded row: prompt | chosen | rejected of each pair, as ERNIEKit lays it out. Rejected starts where positions
    jump back to the end of the prompt."""
    (ids,), (positions,) = recorded["input_ids"], recorded["position_ids"]
    (chosen,), (rejected,) = recorded["chosen_labels"], recorded["rejected_labels"]
    real = max(i for i, token in enumerate(ids) if token) + 1
    starts = [i for i in range(real) if positions[i] == 0] + [real]
    sizes, keys, segment = [], [], [-1] * len(ids)
    for pair, (start, end) in enumerate(pairwise(starts)):
        middle = next(i for i in range(start + 1, end) if positions[i] != positions[i - 1] + 1)
        sizes += [middle - start, end - middle]
        keys += [range(start, middle), [*range(start, start + positions[middle]), *range(middle, end)]]
        for i in range(start, end):
            segment[i] = 2 * pair if chosen[i] else 2 * pair + 1 if rejected[i] else -1
    if real < len(ids):
        sizes.append(len(ids) - real)
        keys.append(range(real, len(ids)))
    labels = [a or b or IGNORE for a, b in zip(chosen, rejected)]
    counts, pairs = [len(k) for k in keys], len(starts) - 1
    return Batch(
        torch.tensor([ids]),
        torch.tensor([labels]),
        torch.tensor([positions]),
        bounds_of(sizes),
        max(sizes),
        sum(label != IGNORE for label in labels),
        shared=SharedKeys(torch.tensor([i for k in keys for i in k]), bounds_of(counts), max(counts)),
        pairs=Pairs(torch.tensor([segment]), pairs, torch.ones(pairs)),
    )


def bounds_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


# --- whole runs ---


def on_one_rank(model: nn.Module) -> Engine:
    return Engine([(0, model)], World(), pick("cpu"), causal_loss)


def recorded_step(
    model: Any,
    hyper: dict[str, Any],
    compat: bool = True,
    engine: Engine | None = None,
    prepare: Callable | None = None,
) -> TrainStep:
    """A step under a recorded run's hyper-parameters."""
    groups = make_groups(model.named_parameters(), len(model.layers), hyper["weight_decay"])
    optimizer = AdamW(groups, (hyper["adam_beta1"], hyper["adam_beta2"]), hyper["adam_epsilon"])
    schedule = Schedule(
        hyper["lr_scheduler_type"],
        hyper["learning_rate"],
        hyper["max_steps"],
        hyper["warmup_steps"],
        hyper["min_lr"],
        one_step_late=compat,
    )
    return TrainStep(engine or on_one_rank(model), optimizer, schedule, hyper["max_grad_norm"], compat, prepare=prepare)


# --- curves of twenty steps, without a trainer ---


def mean_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Over supervised tokens, through the head the trainer uses. Labels come shifted."""
    return model(ids, labels=labels) / (labels != IGNORE).sum()


def full_curve(model: Any, run: dict[str, Any], numbers: Numbers) -> tuple[list[float], list[float]]:
    """Losses and gradient norms (before clipping) of recorded full fine-tuning."""
    groups = make_groups(model.named_parameters(), len(model.layers), run["weight_decay"])
    optimiser = AdamW(groups, (run["beta1"], run["beta2"]), run["epsilon"])
    losses, grad_norms = [], []
    for step in range(run["steps"]):
        k = step % 4
        loss = mean_loss(model, numbers[f"train_ids.{k}"], numbers[f"train_labels_shifted.{k}"])
        loss.backward()
        norm = optimiser.gradient_norm()
        optimiser.clip(norm, run["max_grad_norm"])
        optimiser.step(run["learning_rate"])
        optimiser.zero_grad()
        losses.append(float(loss)), grad_norms.append(float(norm))
    return losses, grad_norms


def norms(entries: list[Entry], tensors: Numbers) -> dict[str, float]:
    """Norms of our fused tensors under another world's names; what was not trained, and the second copy of a tied head,
    is left out."""
    return {
        name: float(part.double().norm())
        for entry in entries
        if not entry.copy_of and entry.ours in tensors
        for name, part in zip(entry.theirs, entry.write(tensors[entry.ours]))
    }


def gradients(model: nn.Module) -> Numbers:
    """Of what was trained."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
