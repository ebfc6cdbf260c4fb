"""Guards over real ranks: one flipped bit, one slow rank and one signal are everybody's business."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.train import stragglers
from erniekit.train.agreement import agree_on_stop
from erniekit.train.drift import Block, ReplicaDrift, ReplicasDiffer
from erniekit.train.save import SaveHook
from erniekit.train.stragglers import Stragglers
from support.clock import Clock
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


class Counted(World):
    """The real one over all ranks of the pool, as data-parallel replicas, with its collectives counted."""

    def __init__(self) -> None:
        super().__init__(Layout(dp=dist.get_world_size()), dist.get_rank())
        self.calls = 0

    def max(self, value: float) -> float:
        self.calls += 1
        return super().max(value)

    def gather(self, value: Any) -> list[Any]:
        self.calls += 1
        return super().gather(value)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"layers.{i}.weight": torch.randn(33, 17, generator=generator) for i in range(4)}


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.view(torch.int32).view(-1)[100] ^= 1 << bit


def everywhere(held: dict[str, torch.Tensor], ranks: tuple[int, ...]) -> list[Block]:
    return [Block(name, ranks) for name in held]


def train_with_one_flipped_bit(flipped_on: int, flipped_at: int, every: int, bit: int) -> tuple[int, int, str, int]:
    """(step the run stopped at, exit code, words, collectives); equal updates on all ranks, except for one bit once."""
    world, held = Counted(), weights()
    hook = ReplicaDrift(everywhere(held, tuple(range(world.size))), lambda: held, world, every)
    for step in range(1, 21):
        for tensor in held.values():
            tensor.mul_(0.999)
        if step == flipped_at and world.rank == flipped_on:
            flip(held["layers.2.weight"], bit)
        try:
            hook.after_step(None, SimpleNamespace(step=step))  # type: ignore[arg-type]
        except ReplicasDiffer as error:
            return step, error.exit_code, str(error), world.calls
    return 20, 0, "", world.calls


def drift_in_one_of_two_sets() -> str:
    """Ranks 0 and 2 hold one shard, 1 and 3 the other: the two that are fine stop as well."""
    world, held = Counted(), weights()
    for tensor in held.values():
        tensor += world.rank % 2
    if world.rank == 3:
        flip(held["layers.0.weight"], 0)
    mine = (0, 2) if world.rank % 2 == 0 else (1, 3)
    hook = ReplicaDrift(everywhere(held, mine), lambda: held, world, every=1)
    with pytest.raises(ReplicasDiffer) as caught:
        hook.check(9)
    return str(caught.value)


def agree_on_a_signal(asked: int | None) -> tuple[str | None, int]:
    world = Counted()
    return agree_on_stop("SIGTERM" if world.rank == asked else None, world), world.calls


def waits_of_a_save(asked: int | None) -> list[bool]:
    """Of the hook that saves, for steps 1 to 4; a signal came to one rank before step 2."""
    world = Counted()
    hook = SaveHook(SimpleNamespace(world=world), None, every=4, grace_seconds=1.0)  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(signals=SimpleNamespace(requested=None))
    waits = []
    for step in range(1, 5):
        if step == 2 and world.rank == asked:
            trainer.signals.requested = "SIGTERM"
        waits.append(hook.waits_for(trainer, step))
    return waits


def train_with_a_slow_rank(slow: int, part: str) -> tuple[list[str], dict[str, Any]]:
    """Each step ends in a collective that waits for the slowest, so that all ranks take the same time; one does ten
    times the work of a part. Seconds are those of the work alone, whatever else the machine does."""
    world, said, clock = Counted(), [], Clock()
    stragglers.time = clock  # type: ignore[assignment]
    hook = Stragglers(world, factor=2.0, every=6, on_slow=lambda step, text: said.append(f"{step}: {text}"))
    for step in range(1, 13):
        for phase in ("data", "forward/backward"):
            hook.phase(phase)
            clock.sleep(0.02 * (10 if world.rank == slow and phase == part else 1))
        hook.phase("collective")
        last = torch.tensor(clock.now, dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        clock.now = last.item()
        hook.after_step(None, SimpleNamespace(step=step))  # type: ignore[arg-type]
    stragglers.time = time  # type: ignore[assignment]
    return said, hook.summary()


def test_a_step_is_waited_for_by_all_ranks_when_a_signal_came_to_one(ranks: Ranks) -> None:
    assert ranks.run(2, waits_of_a_save, None) == [[False, False, False, True]] * 2
    assert ranks.run(2, waits_of_a_save, 1) == [[False, True, True, True]] * 2


@pytest.mark.parametrize(("rank", "bit"), [(2, 0), (0, 31 - 1)])
def test_one_flipped_bit_is_found_within_the_interval_and_its_rank_named(ranks: Ranks, rank: int, bit: int) -> None:
    for step, code, words, calls in ranks.run(3, train_with_one_flipped_bit, rank, 5, 4, bit):
        assert (step, code) == (8, 3), "flipped at step 5, checked every 4"
        assert calls == 4, "one a check, at steps 1, 4 and 8, and one more for the details"
        others = ", ".join(str(r) for r in range(3) if r != rank)
        assert f"rank {rank} differs from ranks {others}" in words
        assert "step 8" in words
        assert "layers.2.weight" in words


def test_equal_replicas_are_left_alone_and_two_that_differ_are_both_named(ranks: Ranks) -> None:
    assert ranks.run(2, train_with_one_flipped_bit, -1, 5, 4, 0) == [(20, 0, "", 6)] * 2, "steps 1, 4, 8, 12, 16, 20"
    for step, code, words, _ in ranks.run(2, train_with_one_flipped_bit, 1, 5, 5, 7):
        assert (step, code) == (5, 3)
        assert "ranks 0, 1 differ, with no majority" in words


def test_ranks_that_differ_from_the_start_are_found_at_the_first_step(ranks: Ranks) -> None:
    for step, code, words, _ in ranks.run(2, train_with_one_flipped_bit, 1, 1, 100, 7):
        assert (step, code) == (1, 3)
        assert "step 1: replicas" in words


def test_drift_in_one_set_of_ranks_stops_every_rank_with_the_same_words(ranks: Ranks) -> None:
    said = ranks.run(4, drift_in_one_of_two_sets)
    assert len(set(said)) == 1
    assert "ranks 1, 3 differ" in said[0]
    assert "layers.0.weight" in said[0]


def test_a_signal_on_one_rank_reaches_every_rank_in_one_reduction(ranks: Ranks) -> None:
    assert ranks.run(3, agree_on_a_signal, 1) == [("SIGTERM", 1)] * 3
    assert ranks.run(3, agree_on_a_signal, None) == [(None, 1)] * 3


@pytest.mark.parametrize(("part", "name"), [("forward/backward", "compute"), ("data", "data")])
def test_a_rank_much_slower_is_named_with_what_is_slow_and_lives(ranks: Ranks, part: str, name: str) -> None:
    for said, summary in ranks.run(3, train_with_a_slow_rank, 1, part):
        assert [text.split(" (")[0] for text in said] == ["6: rank 1 is slow", "12: rank 1 is slow"]
        assert all(f"({name})" in text for text in said)
        (entry,) = summary["slow"]
        assert (entry["rank"], entry["part"], entry["times"]) == (1, name, 2)
        assert entry["worst"] == 5.5, "220 ms of own work against 40; the others wait, and that does not count"
        waits = summary["parts"]["communication"]
        assert waits["slowest_rank"] != 1
        assert waits["least_ms"] < waits["median_ms"] / 2, "the slow one waits for nobody"
