"""One training step of a tiny model as one rank of a layout, for rehearsals: no other rank exists, values are zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from erniekit.data.collate import collate, one_document
from erniekit.data.types import Pack, Sample
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.apply import SpreadOptions, parallelise
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.sharding_table import plain, sharding_of
from erniekit.rehearse.blocking import deadlock
from erniekit.rehearse.calls import Trace
from erniekit.rehearse.compare import Mismatch, compare
from erniekit.rehearse.recorded_group import opened
from erniekit.rehearse.shapes import shapes_only
from erniekit.train.step import TrainStep

LENGTH = 16


def config(layers: int = 4, experts: int = 0) -> DecoderConfig:
    moe = MoEShape(experts, choices=2, width=16, shared_width=0, start=1, end=layers - 1) if experts else None
    return DecoderConfig(
        family="ernie4_5_moe" if experts else "ernie4_5", vocab_size=61, hidden_size=32, intermediate_size=40,
        num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4,
        rope_style="pairs", max_positions=128, tie_word_embeddings=True, moe=moe,
    )  # fmt: skip


def step(
    layout: Layout,
    rank: int,
    micro_batches: int = 2,
    layers: int = 4,
    experts: int = 0,
    length: int = LENGTH,
    **options: Any,
) -> None:
    model_config = config(layers, experts)
    world, spec, device = World(layout, rank), MODELS.get(model_config.family), pick("cpu")
    with torch.device("meta"):
        model = spec.build(model_config)
    sharding = sharding_of(model, spec.plan, layout)
    engine = parallelise(
        model, sharding, world, device, torch.float32, causal_loss, lambda name, piece: piece.zero_(), one_document,
        SpreadOptions(**options),
    )  # fmt: skip
    named = [(plain(n), p) for part in engine.parts for n, p in part.named_parameters() if p.requires_grad]
    optimizer = AdamW(make_groups(named, layers, 0.1), (0.9, 0.95), 1e-6)
    ids = np.arange(1, length + 1, dtype=np.int32)
    batches = [collate([Pack((Sample(ids, ids),), k)], pad_to=length) for k in range(micro_batches)]
    TrainStep(engine, optimizer, Schedule("constant", 1e-3, 9))(batches, 1)


def recorded(size: int, run: Callable[[int], None], shapes: bool = False) -> dict[int, Trace]:
    """run(rank) as each of so many ranks, one after the other. shapes: on tensors without memory."""
    traces = {}
    for rank in range(size):
        with opened(rank, size) as trace:
            if shapes:
                with shapes_only():
                    run(rank)
            else:
                run(rank)
        traces[rank] = trace
    return traces


def faults(traces: dict[int, Trace]) -> list[Mismatch]:
    stuck = deadlock(traces)
    return compare(traces) + ([stuck] if stuck is not None else [])


def told(traces: dict[int, Trace]) -> str:
    """All that is found, as a person reads it."""
    return "\n".join(line for finding in faults(traces) for line in finding.text())
