"""On one card, world size 1 through the engine costs what a hand-written loop costs."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest
import torch
from device_cases.steps import ERNIE_03B

from erniekit.data.collate import collate
from erniekit.data.types import Pack, Sample
from erniekit.devices import pick
from erniekit.losses.causal import causal_loss
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.train.step import TrainStep

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]


def test_the_engine_adds_at_most_one_percent() -> None:
    device = torch.device("cuda")
    model = Decoder(ERNIE_03B)
    init_weights(model, 0, 0.02)
    model.to(device, torch.bfloat16).train()
    optimizer = AdamW(make_groups(model.named_parameters(), 18, 0.1), (0.9, 0.95), 1e-8, low_precision=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 100000, (2, 8192)).astype(np.int32)
    batch = collate([Pack((Sample(ids[0], ids[1]),))])
    step = TrainStep(Engine([(0, model)], World(), pick("gpu"), causal_loss), optimizer, Schedule("constant", 1e-5, 99))

    def plain() -> None:
        moved = batch.to(device)
        loss = causal_loss(model, moved) / batch.num_label_tokens
        loss.backward()
        norm = optimizer.gradient_norm()
        torch.stack((loss.detach(), norm)).tolist()
        optimizer.clip(norm, 1.0)
        optimizer.step(1e-5)
        optimizer.zero_grad()

    def seconds(run: object) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(5):
        plain(), step([batch], 1)
    times: dict[str, list[float]] = {"plain": [], "engine": []}
    for _ in range(30):  # interleaved, so that clocks and neighbours touch both alike
        times["plain"].append(seconds(plain))
        times["engine"].append(seconds(lambda: step([batch], 1)))
    ratio = median(times["engine"]) / median(times["plain"])
    assert ratio < 1.01, {name: median(took) for name, took in times.items()}
