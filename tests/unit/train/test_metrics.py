"""What a logged step is made of: the numbers others tell beside the loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from erniekit.checkpoint.state import TrainState
from erniekit.devices.cpu import make
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.train.guard import FiniteGuard
from erniekit.train.metrics import LogHook, StepStatistics
from erniekit.train.step import DeviceClock, Launched, StepResult
from erniekit.train.trainer import Trainer
from support.clock import Clock

# ERNIE-4.5-21B-A3B
SPARSE = DecoderConfig(
    family="ernie4_5_moe", vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_layers=28, num_heads=20,
    num_kv_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
    max_positions=131072, mtp_layers=1, moe=MoEShape(64, 6, 1536, 3072, start=1, end=27),
)  # fmt: skip


def result(step: int, **extras: float) -> StepResult:
    return StepResult(step, 2.0, 1.0, 1e-3, 10, 5, 100, True, extras)


def test_numbers_told_beside_the_loss_are_logged_as_means_since_the_last_record() -> None:
    logged: list[dict[str, Any]] = []
    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **k: None, advance=lambda step: None
    )
    trainer = SimpleNamespace(max_steps=4, state=SimpleNamespace(step=0, packs=4))
    hook = LogHook(trackers, make(), SPARSE, torch.float32, 2, 1, 10, False, also=lambda: {"moe_load": 1.5})  # type: ignore[arg-type]
    hook.on_start(trainer)  # type: ignore[arg-type]
    for step, told in ((1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)):
        hook.after_step(trainer, result(step, router_aux=told))  # type: ignore[arg-type]
    assert [r["router_aux"] for r in logged] == [pytest.approx(2.0), pytest.approx(6.0)]
    assert [r["moe_load"] for r in logged] == [1.5, 1.5]
    assert [r["loss"] for r in logged] == [2.0, 2.0]


def test_the_usual_speed_is_that_of_most_records_and_rows_are_those_of_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = Clock()
    monkeypatch.setattr("erniekit.train.metrics.time", now)
    trackers = SimpleNamespace(log=lambda *_: None, start=lambda **k: None, advance=lambda step: None)
    trainer = SimpleNamespace(max_steps=6, state=SimpleNamespace(step=0, packs=4))
    hook = LogHook(trackers, make(), SPARSE, torch.float32, 1, 2, 10, False)  # type: ignore[arg-type]
    hook.on_start(trainer)  # type: ignore[arg-type]
    assert hook.usual() is None
    for step, seconds in enumerate((9.0, 1.0, 1.0, 4.0, 1.0, 5.0), 1):  # a first step that compiles, others that wait
        now.sleep(seconds)
        hook.after_step(trainer, replace(result(step), finished_at=now.perf_counter()))  # type: ignore[arg-type]
    assert hook.usual() == StepStatistics(speed=10.0, pack=5.0, document=10.0, trained=0.5)


def test_waiting_for_data_counts_where_the_device_had_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step launched at 2 and finished at 10: its successor's data, asked for at 3, came at 12, and the third's, asked
    for at 13, at 14, while the second was computed until 20."""
    now, logged = [0.0], list[dict[str, Any]]()
    monkeypatch.setattr("erniekit.train.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **k: None, advance=lambda step: None
    )
    trainer = SimpleNamespace(max_steps=3, state=SimpleNamespace(step=0, packs=4))
    hook = LogHook(trackers, make(), SPARSE, torch.float32, 3, 1, 10, False)  # type: ignore[arg-type]
    hook.on_start(trainer)  # type: ignore[arg-type]
    for step, (asked, came) in enumerate(((0.0, 2.0), (3.0, 12.0), (13.0, 14.0)), 1):
        for name, when in (("data", asked), ("collective", came)):
            now[0] = when
            hook.phase(name)
        if step > 1:
            hook.after_step(trainer, replace(result(step - 1), finished_at=10.0 * (step - 1)))  # type: ignore[arg-type]
    hook.after_step(trainer, replace(result(3), finished_at=40.0))  # type: ignore[arg-type]
    (record,) = logged
    assert record["data_wait"] == pytest.approx((2.0 + 2.0 + 0.0) / 40.0)


class Card:
    """A device that works through what it is given, one after the other, and a host that only queues and looks."""

    asynchronous = True

    def __init__(self, host: Clock) -> None:
        self.host, self.free_at = host, host.now

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host.now) + seconds

    def event(self) -> Any:
        card, at = self, [0.0]

        class Event:
            def record(self) -> None:
                at[0] = max(card.free_at, card.host.now)

            def synchronize(self) -> None:
                card.host.now = max(card.host.now, at[0])

            def elapsed_time(self, later: Any) -> float:
                return (later.at() - at[0]) * 1e3

            def at(self) -> float:
                return at[0]

        return Event()


@pytest.mark.parametrize("host_s", [0.01, 0.3], ids=["the device is the slower one", "the host is"])
@pytest.mark.parametrize("every", [1, 4])
def test_the_last_record_has_the_rate_of_all_others_however_late_the_host_looked_at_the_first(
    monkeypatch: pytest.MonkeyPatch, host_s: float, every: int
) -> None:
    """The host compiles for 7 s while the device has long done the first step; of the last step it waits for the
    result, of others it looks one step later."""
    host, device_s, steps, logged = Clock(), 0.1, 9, dict[int, dict[str, Any]]()
    for module in ("step", "metrics"):
        monkeypatch.setattr(f"erniekit.train.{module}.time", host)
    card = Card(host)
    clock = DeviceClock(card)  # type: ignore[arg-type]

    def launch(micro: Any, step: int) -> Launched:
        clock.start()
        host.sleep(7.0 if step == 2 else host_s)
        card.work(device_s)
        return Launched(torch.tensor([2.0, 1.0]), torch.ones(()), lambda values: result(step), clock)

    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.update({step: record}), start=lambda **k: None, advance=lambda step: None
    )
    hook = LogHook(trackers, make(), SPARSE, torch.float32, every, 1, 10, False)  # type: ignore[arg-type]
    step = SimpleNamespace(launch=launch, late=True, phase=None)
    batches = [SimpleNamespace(pack_indices=(k,)) for k in range(steps)]
    made: dict[str, Any] = dict(batches_from=lambda pack: iter([[b] for b in batches]), roll_back=lambda state: None)
    signals: Any = SimpleNamespace(requested=None)
    made |= dict(max_steps=steps, packs_per_step=1, hooks=[hook], guard=FiniteGuard(3), signals=signals)
    Trainer(step, TrainState(), **made).fit()  # type: ignore[arg-type]
    true = 10 / max(device_s, host_s)
    assert [record["tokens_per_second"] for step, record in logged.items() if step > 4] == pytest.approx(
        [true] * sum(step > 4 for step in logged)
    )
    assert steps in logged
