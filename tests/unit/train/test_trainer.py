"""The loop: whether a step's numbers come at once or after the next one's launch, the run is the same."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from erniekit.checkpoint.state import TrainState
from erniekit.data.collate import collate
from erniekit.data.types import Batch, Pack, Sample
from erniekit.devices import pick
from erniekit.devices.cpu import make
from erniekit.losses.causal import causal_loss
from erniekit.models.config import DecoderConfig
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.optim.adamw import AdamW
from erniekit.optim.groups import make_groups
from erniekit.optim.schedule import Schedule
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.train.guard import FiniteGuard, NotFinite, Signals
from erniekit.train.hooks import Hook, TrainingLoop
from erniekit.train.metrics import LogHook
from erniekit.train.step import Launched, StepResult, TrainStep
from erniekit.train.trainer import Trainer
from support.optimizer_steps import steps_taken
from support.plain_adamw import PlainAdamW

CONFIG = DecoderConfig(
    family="ernie4_5", vocab_size=31, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True, max_positions=128,
)  # fmt: skip


class AtOnce(TrainStep):
    late = False


class Notes(Hook):
    """What a hook that only reads results sees of the loop."""

    def __init__(self) -> None:
        self.seen: list[StepResult] = []
        self.late: list[bool] = []
        self.launches: list[Launched] = []

    def launched(self, trainer: TrainingLoop, step: Launched) -> None:
        self.launches.append(step)
        step.bring("number", torch.tensor(len(self.launches)))

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        assert trainer.state.step == result.step
        self.seen.append(result)
        self.late.append(trainer.ahead)


class Keeper(Hook):
    """Keeps the whole state every `every` steps, as a checkpoint does."""

    def __init__(self, run: Run, every: int) -> None:
        self.run, self.every = run, every
        self.kept: dict[int, tuple[dict, int, dict, dict, TrainState]] = {}

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return step % self.every == 0

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        if result.step % self.every == 0 and not trainer.state.bad_in_a_row:
            assert not trainer.ahead
            o = self.run.optimizer
            parts = (dict(self.run.model.state_dict()), steps_taken(o), dict(o.state_tensors()), dict(o.masters))
            self.kept[result.step] = copy.deepcopy((*parts, trainer.state))

    def restore(self, state: TrainState) -> None:
        weights, steps, moments, masters, saved = self.kept[max(self.kept)]
        self.run.model.load_state_dict(weights)
        self.run.optimizer.load(steps, moments, masters)
        vars(state).update(vars(saved))


class Run:
    """A tiny training whose losses are not numbers on some packs."""

    def __init__(
        self, kind: type[TrainStep] = TrainStep, bad: Sequence[int] = (), steps: int = 8, keep: int = 3
    ) -> None:
        self.model = Decoder(CONFIG)
        init_weights(self.model, seed=1, std=0.3)
        self.optimizer = AdamW(make_groups(self.model.named_parameters(), 1, 0.1), (0.9, 0.95), 1e-8)
        self.optimizer.fused = PlainAdamW()  # type: ignore[assignment]

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            return causal_loss(model, batch) + (float("nan") if batch.pack_indices[0] in bad else 0.0)

        engine = Engine([(0, self.model)], World(), pick("cpu"), loss)
        self.notes, self.keeper = Notes(), Keeper(self, keep)
        self.read: list[int] = []  # packs, in the order they were asked for
        self.trainer = Trainer(
            kind(engine, self.optimizer, Schedule("linear", 1e-2, 20)), TrainState(), self.batches_from, steps, 1,
            [self.notes, self.keeper], FiniteGuard(max_bad_steps=2), Signals(), self.keeper.restore,
        )  # fmt: skip

    def batches_from(self, pack: int) -> Iterator[list[Batch]]:
        while True:
            rng = np.random.default_rng(pack)
            ids, labels = (rng.integers(3, 31, 9).astype(np.int32) for _ in range(2))
            self.read.append(pack)
            yield [collate([Pack((Sample(ids, labels),), pack)])]
            pack += 1

    def outcome(self) -> tuple[list[tuple[int, str, bool]], dict[str, Any], list[list[float]]]:
        told = [(r.step, f"{r.loss:.9g} {r.grad_norm:.9g} {r.learning_rate}", r.applied) for r in self.notes.seen]
        return told, vars(self.trainer.state), [p.detach().flatten().tolist() for p in self.model.parameters()]


def test_results_come_in_order_each_once_and_late_only_where_nobody_waits() -> None:
    run = Run(steps=8, keep=3)
    run.trainer.fit()
    assert [r.step for r in run.notes.seen] == list(range(1, 9))
    assert [int(r.brought["number"]) for r in run.notes.seen] == list(range(1, 9))
    waited = {3, 6, 8}  # those that are kept, and the last
    assert {step for step, late in enumerate(run.notes.late, 1) if not late} == waited
    assert not run.trainer.ahead


@pytest.mark.parametrize("bad", [(), (2, 4), (7,), (3, 4), (4, 5), (6, 7, 8)])
def test_a_run_whose_results_come_late_is_the_run_whose_results_come_at_once(bad: tuple[int, ...]) -> None:
    """One bad step is skipped; two in a row go back to what was kept, and the data goes on behind them. Pack p is step
    p + 1, and steps 3 and 6 are waited for."""
    late, at_once = Run(bad=bad), Run(AtOnce, bad)
    late.trainer.fit()
    at_once.trainer.fit()
    assert any(late.notes.late)
    assert not any(at_once.notes.late)
    assert late.outcome() == at_once.outcome()
    assert late.trainer.state.rollbacks == (1 if len(bad) > 1 and bad[1] == bad[0] + 1 else 0)
    assert list(late.keeper.kept) == list(at_once.keeper.kept)
    for mine, other in zip(late.keeper.kept.values(), at_once.keeper.kept.values()):
        assert mine[-1] == other[-1]
        assert all(torch.equal(mine[0][name], other[0][name]) for name in mine[0])


def test_a_run_that_stays_bad_ends_with_the_same_words() -> None:
    words = []
    for kind in (TrainStep, AtOnce):
        with pytest.raises(NotFinite) as caught:
            Run(kind, bad=range(4, 40), steps=30).trainer.fit()
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_a_step_launched_behind_a_stretch_that_is_given_up_is_read_again() -> None:
    run = Run(bad=(3, 4), steps=8)
    run.trainer.fit()
    assert run.read == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9], "once in vain, behind the second bad step"
    assert [r.step for r in run.notes.seen] == [1, 2, 3, 4, 4, 5, 6, 7, 8], "the second bad step is given up too"


def test_a_hook_that_looks_at_each_step_is_given_each_before_the_next_begins() -> None:
    class Looks(Hook):
        def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
            assert not trainer.ahead

    run = Run(steps=4)
    run.trainer.hooks = [*run.trainer.hooks, Looks()]
    run.trainer.fit()
    assert run.notes.late == [False] * 4


def test_a_stop_asked_for_by_a_late_hook_books_what_was_launched_meanwhile() -> None:
    class Stops(Hook):
        def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
            return False

        def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
            if result.step == 4:
                trainer.stop_reason = "enough"

    run = Run(steps=8)
    run.trainer.hooks = [*run.trainer.hooks, Stops()]
    run.trainer.fit()
    assert [r.step for r in run.notes.seen] == [1, 2, 3, 4, 5]
    assert run.trainer.state.step == 5
    assert steps_taken(run.optimizer) == 5, "the state is that of the weights"


@pytest.mark.parametrize("kind", [TrainStep, AtOnce])
def test_every_records_rate_is_of_the_time_its_steps_took_also_the_last_ones(kind: type[TrainStep]) -> None:
    """Steps of 50 ms each; the last record is of one step, which on a card is booked right behind the one before."""
    logged: list[dict[str, Any]] = []
    trackers = SimpleNamespace(
        log=lambda step, record, kind: logged.append(record), start=lambda **k: None, advance=lambda step: None
    )
    run = Run(kind, steps=7, keep=100)
    plain = run.trainer.step.launch

    def slow(batches: Sequence[Batch], step: int) -> Launched:
        time.sleep(0.05)
        return plain(batches, step)

    run.trainer.step.launch = slow  # type: ignore[method-assign]
    log = LogHook(trackers, make(), CONFIG, torch.float32, 3, 1, 10, frozen_base=False)  # type: ignore[arg-type]
    run.trainer.hooks = [*run.trainer.hooks, log]
    run.trainer.fit()
    assert len(logged) == 3
    for record, steps in zip(logged, (3, 3, 1)):
        assert record["interval_runtime"] >= 0.05 * steps * 0.99
        assert record["interval_steps_per_second"] <= 1.01 / 0.05
        assert record["tokens_per_second"] == pytest.approx(9 * steps / record["interval_runtime"])
