"""One optimiser step: what divides the loss, what is skipped, and what packing may not change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from erniekit.data.collate import collate
from erniekit.data.types import IGNORE, Batch, Pack, Sample
from erniekit.devices import pick
from erniekit.devices.base import Device
from erniekit.kernels.adamw import FusedAdamW
from erniekit.losses.causal import causal_loss
from erniekit.models.config import DecoderConfig
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.in_backward import BackwardUpdates
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine, Loss
from erniekit.parallel.islands import Islands
from erniekit.parallel.mesh import World
from erniekit.train.step import DeviceClock, TrainStep
from support.clock import Clock

CONFIG = DecoderConfig(
    family="ernie4_5", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True, max_positions=128,
)  # fmt: skip


def model() -> Decoder:
    built = Decoder(CONFIG)
    init_weights(built, seed=1, std=0.3)
    return built


def samples(count: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    out = []
    for _ in range(count):
        n = int(rng.integers(3, 20))
        ids, labels = rng.integers(3, 61, n).astype(np.int32), rng.integers(3, 61, n).astype(np.int32)
        labels[: int(rng.integers(0, n))] = IGNORE
        out.append(Sample(ids, labels))
    return out


def on_one_rank(built: Decoder, loss: Loss = causal_loss) -> Engine:
    return Engine([(0, built)], World(), pick("cpu"), loss)


def run(batches: list[Batch], steps: int = 3, compat: bool = False) -> tuple[Decoder, list[float]]:
    built = model()
    optimizer = AdamW(make_groups(built.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    step = TrainStep(on_one_rank(built), optimizer, Schedule("constant", 1e-3, 99), mean_of_means=compat)
    losses = [step(batches, k).loss for k in range(1, steps + 1)]
    return built, losses


def far(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters()))


def test_one_batch_of_eight_equals_eight_accumulated_batches_of_one() -> None:
    rows = [Pack((s,)) for s in samples(8)]
    whole, a = run([collate(rows)])
    parts, b = run([collate([row]) for row in rows])
    assert a == pytest.approx(b, abs=1e-6)
    # AdamW divides by the gradient's own size: where that is near rounding, fp32 sums in another order show in the
    # weights at 1e-3 (the learning rate) times their relative error. 1.7e-6 was the most seen, on AVX-512.
    assert far(whole, parts) < 5e-6


def test_under_compat_accumulation_changes_the_loss_as_it_does_in_erniekit() -> None:
    rows = [Pack((s,)) for s in samples(8)]
    _, a = run([collate(rows)], steps=1, compat=True)
    _, b = run([collate([row]) for row in rows], steps=1, compat=True)
    assert abs(a[0] - b[0]) > 1e-3


def test_packed_rows_train_exactly_as_unpacked_ones() -> None:
    docs = samples(6)
    apart, a = run([collate([Pack((s,)) for s in docs])])
    packed, b = run([collate([Pack(tuple(docs[:3])), Pack(tuple(docs[3:]))])])
    assert a == pytest.approx(b, abs=1e-6)
    assert far(apart, packed) < 1e-6


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    built = model()
    optimizer = AdamW(make_groups(built.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)

    def broken(m: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return causal_loss(m, batch) * float("nan")

    step = TrainStep(on_one_rank(built, broken), optimizer, Schedule("constant", 1e-2, 9))
    before = [p.detach().clone() for p in built.parameters()]
    result = step([collate([Pack((samples(1)[0],))])], 1)
    assert not result.applied
    assert math.isnan(result.loss)
    assert all(torch.equal(p, q) for p, q in zip(before, built.parameters()))
    assert optimizer.gradients() == {}, "no broken gradient is left for the next step"


def test_results_are_read_at_once_on_unlike_devices_whatever_the_optimiser_could() -> None:
    built = model()
    engine, optimizer = on_one_rank(built), AdamW(make_groups(built.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    optimizer.fused = FusedAdamW()
    step = TrainStep(engine, optimizer, Schedule("constant", 1e-2, 9))
    assert step.late
    engine.world.islands = Islands(("gpu", "cpu"), ("cpu:gloo,cuda:nccl", "gloo"))
    assert not step.late


def test_updates_inside_backward_are_those_after_it_where_nothing_is_clipped() -> None:
    batch = [collate([Pack((sample,)) for sample in samples(4)])]
    outcomes = []
    for inside in (False, True):
        built = model()
        optimizer = AdamW(make_groups(built.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
        updates = BackwardUpdates(optimizer, 0.0) if inside else None
        step = TrainStep(on_one_rank(built), optimizer, Schedule("constant", 1e-3, 99), 0.0, in_backward=updates)
        outcomes.append((built, [step(batch, k) for k in range(1, 4)]))
    (plain, after), (other, within) = outcomes
    assert [result.loss for result in after] == [result.loss for result in within]
    for a, b in zip(after, within):
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), other.parameters()))


def test_inside_backward_a_bad_gradient_is_told_apart_from_a_bad_loss() -> None:
    """The first leaves its tensor alone and counts as an update; the second changes nothing."""
    built = model()
    optimizer = AdamW(make_groups(built.named_parameters(), 2, 0.1), (0.9, 0.95), 1e-8)
    factor = 1.0

    def maybe_broken(m: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return causal_loss(m, batch) * factor

    updates = BackwardUpdates(optimizer, 1.0)
    step = TrainStep(on_one_rank(built, maybe_broken), optimizer, Schedule("constant", 1e-2, 9), in_backward=updates)
    batch = [collate([Pack((samples(1)[0],))])]
    first = step(batch, 1)
    assert (first.applied, first.partly) == (True, False)
    assert first.grad_norm == pytest.approx(optimizer.numbers()["last_norm"])
    name, param = next(iter(optimizer.params.items()))
    handle = param.register_hook(lambda grad: grad * float("inf"))
    before = {n: p.detach().clone() for n, p in built.named_parameters()}
    second = step(batch, 2)
    handle.remove()
    assert (second.applied, second.partly) == (False, True)
    left = {n for n, p in built.named_parameters() if torch.equal(p, before[n])}
    assert left == {name}
    factor = float("nan")
    before = {n: p.detach().clone() for n, p in built.named_parameters()}
    third = step(batch, 3)
    assert (third.applied, third.partly) == (False, False)
    assert all(torch.equal(p, before[n]) for n, p in built.named_parameters())


def test_a_device_tells_when_it_finished_however_late_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1e3

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    class Late(Device):
        def event(self) -> Event:
            return Event(100.0)

    host, clock = Clock(), DeviceClock(Late("late", "cpu", 0))
    monkeypatch.setattr("erniekit.train.step.time", host)
    clock.start()
    began = host.now
    host.sleep(0.05)  # the host compiles: it looks at the first step only now
    assert clock.time_of(Event(100.02)) == pytest.approx(began + 0.02, rel=1e-9)
    assert clock.time_of(Event(100.03)) == pytest.approx(began + 0.03, rel=1e-9)
    assert clock.time_of(Event(100.05)) == pytest.approx(began + 0.05, rel=1e-9), "looked at at once, counted the same"


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    good = collate([Pack((samples(3)[2],))])
    empty = collate([Pack((Sample(np.arange(3, 9, dtype=np.int32), np.full(6, IGNORE, dtype=np.int32)),))])
    _, a = run([good])
    _, b = run([good, empty])
    assert a == b
