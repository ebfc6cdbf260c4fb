"""Which sample comes at position i of a run: a pure function of the sizes, the probabilities, the seed and i.

PackStream walks an order; nothing here is saved, so one position resumes a run whatever the number of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from typing import Any, Protocol

import numpy as np

from erniekit.errors import ConfigError, DataError
from erniekit.printable import counted

STRATEGIES = ("random", "concat", "interleave_under", "interleave_over")
BLOCK = 1024  # positions that share one exact division among the sources
COUNTED = 1 << 16  # positions that are counted at once
SMALLEST_SHARE = Fraction(1, 2**20)  # a block must hold at least one draw of every source
PASS, TABLE = 0, 1  # keep the two uses of one seed apart

Drawn = tuple[np.ndarray, np.ndarray]  # source number and sample index per position, index -1: an empty place


class DrawOrder(Protocol):
    def take(self, start: int, count: int) -> Drawn:
        """Positions [start, start + count)."""

    def epoch_size(self) -> int:
        """Positions in one epoch; packs never mix two epochs."""


def shares(probs: Sequence[float]) -> list[Fraction]:
    """Probabilities as exact fractions that sum to 1; what a person typed as 0.7 is 7/10."""
    exact = [Fraction(str(p)) for p in probs]
    if any(p < 0 for p in exact) or sum(exact) <= 0:
        raise ConfigError(
            f"probabilities {', '.join(map(str, probs))} cannot be normalised",
            where="train_dataset_prob",
            fix="give one number of 0 or more per source, at least one above 0",
        )
    total = sum(exact)
    return [p / total for p in exact]


class SampleOrder:
    """Every source is walked in passes, each pass a fresh permutation (file order when `shuffle` is off).

    random: each source gets its share of every block of positions, to within one draw; an epoch is as many
        positions as the sources have samples. With one source an epoch is one pass.
    concat: every sample of every source once an epoch; probabilities only decide which take part.
    interleave_under, interleave_over: shares as given; an epoch ends when the first, or the last, source is
        used up.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        probs: Sequence[float] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        strategy: str = "random",
        drawn: Sequence[int] = (),
        keys: Sequence[np.ndarray] = (),
        ordered_passes: int | None = None,
    ) -> None:
        """drawn: of each source, draws that were made before position 0. keys: of each source, numbers that its samples
        are ordered by, equal ones as they would be without, in the first `ordered_passes` passes; None: in all."""
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"unknown mix_strategy {strategy!r}",
                where="mix_strategy",
                fix=f"one of {', '.join(STRATEGIES)}",
            )
        probs = [1.0] * len(sizes) if probs is None else list(probs)
        if len(probs) != len(sizes):
            raise ConfigError(
                f"{counted(len(sizes), 'source')} but {counted(len(probs), 'probability', 'probabilities')}",
                where="train_dataset_prob",
            )
        share = shares(probs)
        self.seed, self.shuffle = seed, shuffle
        self._keys, self._ordered_passes = list(keys), ordered_passes
        self._live = [s for s, p in enumerate(share) if p > 0]  # source numbers stay the caller's
        self._sizes = [int(sizes[s]) for s in self._live]
        self._share = [share[s] for s in self._live]
        self._drawn = [int(drawn[s]) if drawn else 0 for s in self._live]
        for s, size in zip(self._live, self._sizes):
            if size < 1:
                raise DataError(f"source {s + 1} has no usable sample", fix="set its probability to 0 or fix the file")
        self._weighted = strategy == "random" and len(self._live) > 1
        if self._weighted and min(self._share) < SMALLEST_SHARE:
            raise ConfigError(
                f"a probability of {float(min(self._share)):.2g} would hardly ever be drawn",
                where="train_dataset_prob",
                fix="raise it to at least one in a million, or set it to 0",
            )
        self._block = max(BLOCK, ceil(1 / min(self._share)))
        self._draws = self._draws_per_epoch(strategy)
        self._in_file_order = strategy == "concat"  # when not shuffled: one file after the other
        # NumPy freezes RandomState's streams but not a Generator's; an upgrade must not reorder a resumed run
        self._random = np.random.RandomState()
        self._memo: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def _draws_per_epoch(self, strategy: str) -> list[int]:
        if not strategy.startswith("interleave"):
            return self._sizes
        under = strategy == "interleave_under"
        ends = [size / share for size, share in zip(self._sizes, self._share)]
        length = min(ends) if under else max(ends)
        draws = [floor(length * share) if under else ceil(length * share) for share in self._share]
        return [max(1, n) for n in draws]

    def epoch_size(self) -> int:
        return sum(self._draws)

    def draws(self, positions: int, sources: int) -> list[int]:
        """Of each of the sources, how often it is drawn in the first positions."""
        counts = np.zeros(sources, dtype=np.int64)
        for start in range(0, positions, COUNTED):
            source, index = self.take(start, min(COUNTED, positions - start))
            counts += np.bincount(source[index >= 0], minlength=sources)
        return [int(count) for count in counts]

    def __getitem__(self, position: int) -> tuple[int, int]:
        source, index = self.take(position, 1)
        return int(source[0]), int(index[0])

    def take(self, start: int, count: int) -> Drawn:
        unit = self._block if self._weighted else self.epoch_size()
        return gather(lambda n: self._remember((TABLE, n), self._table, n), unit, start, count)

    def _remember(self, key: tuple[int, ...], make: Callable[..., Any], *args: int) -> Any:
        """The last few tables and permutations: the current ones, and the next where a pass ends."""
        if key not in self._memo:
            self._memo[key] = make(*args)
            while len(self._memo) > 2 + 2 * len(self._live):
                self._memo.popitem(last=False)
        self._memo.move_to_end(key)
        return self._memo[key]

    def _walk(self, k: int, first: int, count: int) -> np.ndarray:
        """Draws [first, first + count) of used source k, pass after pass."""
        size, parts = self._sizes[k], []
        if not self.shuffle and not self._keys:
            return np.arange(first, first + count) % size
        while count > 0:
            number, offset = divmod(first, size)
            order = self._remember((PASS, k, number), self._permutation, k, number)
            parts.append(order[offset : offset + count])
            first, count = first + len(parts[-1]), count - len(parts[-1])
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _seeded(self, *numbers: int) -> np.random.RandomState:
        self._random.seed(self._seed_key(*numbers))
        return self._random

    def _seed_key(self, *numbers: int) -> np.ndarray:
        return np.array([self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, *numbers], dtype=np.uint32)

    def _permutation(self, k: int, number: int) -> np.ndarray:
        order = np.arange(self._sizes[k], dtype=np.int32)
        if self.shuffle:
            # the source's own number, so that a zero-probability neighbour changes nothing
            order = self._seeded(PASS, self._live[k], number).permutation(self._sizes[k]).astype(np.int32)
        if self._keys and (self._ordered_passes is None or number < self._ordered_passes):
            order = order[np.argsort(self._keys[self._live[k]][order], kind="stable")]
        return order

    def _before(self, block: int) -> list[int]:
        """Draws of each used source in all blocks before this one: differences of rounded running shares, so
        they sum to the positions, never fall from block to block, and are within one draw of exact."""
        positions, running, bounds = block * self._block, Fraction(0), [0]
        for share in self._share:
            running += share
            bounds.append((2 * positions * running.numerator + running.denominator) // (2 * running.denominator))
        return [b - a for a, b in pairwise(bounds)]

    def _table(self, number: int) -> Drawn:
        """Block `number` of the endless weighted order, or epoch `number` of the others."""
        if self._weighted:
            first = self._before(number)
            counts = [b - a for a, b in zip(first, self._before(number + 1))]
        else:
            counts = self._draws
            passes = [-(-n // size) for n, size in zip(counts, self._sizes)]  # every epoch starts with a whole pass
            first = [number * p * size for p, size in zip(passes, self._sizes)]
        walks = [self._walk(k, self._drawn[k] + first[k], counts[k]) for k in range(len(counts))]
        if len(counts) == 1:
            return np.broadcast_to(np.int64(self._live[0]), counts[0]), walks[0]
        place = self._arrange(counts, number)
        index = np.empty(len(place), dtype=np.int32)
        for k, walk in enumerate(walks):
            index[place == k] = walk
        return np.array(self._live, dtype=np.int64)[place], index

    def _arrange(self, counts: list[int], number: int) -> np.ndarray:
        """Which used source is at each position; within a source the order is its own."""
        place = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
        if self.shuffle:
            self._seeded(TABLE, number).shuffle(place)
        elif not self._in_file_order:  # spread each source evenly
            when = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n])
            place = place[np.argsort(when, kind="stable")]
        return place


def gather(table: Callable[[int], Drawn], unit: int, start: int, count: int) -> Drawn:
    """Positions [start, start + count) out of consecutive tables of `unit` positions."""
    parts = []
    while count > 0:
        number, offset = divmod(start, unit)
        source, index = table(number)
        parts.append((source[offset : offset + count], index[offset : offset + count]))
        start, count = start + len(parts[-1][0]), count - len(parts[-1][0])
    if len(parts) == 1:
        return parts[0]
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *(p[0] for p in parts)]), np.concatenate([empty, *(p[1] for p in parts)])
