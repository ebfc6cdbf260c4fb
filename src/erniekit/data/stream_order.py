"""Order and packs of sources whose sizes are not known yet: as in mix.py and pack.py, a function of seed and position.

recipes/streaming.py builds them. A source that ends is walked again from its beginning, like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock, RLock
from typing import Any

import numpy as np

from erniekit.data.mix import PASS, Drawn, DrawOrder, SampleOrder
from erniekit.data.pack import Members, PackStream
from erniekit.data.stream_source import StreamSource


class StreamOrder(SampleOrder):
    """Several sources with shares are drawn as in SampleOrder; one, or `concat`, is read from beginning to end.

    shuffle: within blocks of `block` samples of a source, of which all must have been read; a source that has no more
    is in the order that SampleOrder gives it.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        probs: Sequence[float] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        strategy: str = "random",
        block: int = 10_000,
    ) -> None:
        super().__init__([1] * len(sources), probs, seed=seed, shuffle=shuffle, strategy=strategy)  # sizes: see _walk
        self._sources = [sources[s] for s in self._live]
        self._block_size = block
        self._guard = Lock()
        # Where an epoch ends is found by reading on: first in the source that is drawn most, of which little is unused.
        ranked = sorted(range(len(self._live)), key=lambda k: -self._share[k]) if self._weighted else ()
        self._used = [self._sources[k] for k in ranked] or self._sources

    def epoch_size(self) -> int:
        raise TypeError("the sources are still being read: how many samples an epoch has is not known")

    def left(self, start: int, wanted: int) -> int:
        """Positions up to the end of the epoch that `start` is in; `wanted` where there are as many or more."""
        end = self._end_before(start + wanted)
        return wanted if end is None else min(wanted, end - start % end)

    def _end_before(self, position: int) -> int | None:
        """The samples of all sources, if they are fewer than `position`."""
        before = 0
        for source in self._used:
            if source.require(position - before):
                return None
            before += source.size or 0
        return before

    def take(self, start: int, count: int) -> Drawn:
        if self._weighted:
            return super().take(start, count)
        end = self._end_before(start + count)
        number, offset = (0, start) if end is None else divmod(start, end)
        parts: list[Drawn] = []
        for k, source in enumerate(self._sources):
            if not count:
                break
            if not source.require(offset + 1):
                offset -= source.size or 0
                continue
            here = count if source.require(offset + count) else (source.size or 0) - offset
            first = offset + number * (source.size or 0)
            parts.append((np.full(here, self._live[k], np.int64), self._walk(k, first, here)))
            offset, count = 0, count - here
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _remember(self, key: tuple[int, ...], make: Callable[..., Any], *args: int) -> Any:
        """Making one may wait for rows: other threads go on with those that are there."""
        with self._guard:
            if key in self._memo:
                self._memo.move_to_end(key)
                return self._memo[key]
        made = make(*args)
        with self._guard:
            return super()._remember(key, lambda: made)

    def _seeded(self, *numbers: int) -> np.random.RandomState:
        return np.random.RandomState(self._seed_key(*numbers))  # of its own: several threads draw

    def _walk(self, k: int, first: int, count: int) -> np.ndarray:
        """As SampleOrder's, by what has been read."""
        source, parts = self._sources[k], [np.zeros(0, np.int64)]
        while count > 0:
            number, offset = (0, first) if source.require(first + 1) else divmod(first, source.size or 1)
            part = self._run(k, number, offset, count)
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)

    def _run(self, k: int, number: int, offset: int, count: int) -> np.ndarray:
        """Of pass `number`, the samples from `offset` on: `count` of them, or fewer where a block or the pass ends."""
        source = self._sources[k]
        if not self.shuffle:
            here = count if source.require(offset + count) else (source.size or 0) - offset
            return np.arange(offset, offset + here)
        block, at = divmod(offset, self._block_size)
        order: np.ndarray = self._remember((PASS, k, number, block), self._shuffled, k, number, block)
        return order[at : at + count]

    def _shuffled(self, k: int, number: int, block: int) -> np.ndarray:
        source, first = self._sources[k], block * self._block_size
        whole = source.require(first + self._block_size)
        size = self._block_size if whole else (source.size or 0) - first
        further = (block,) if block else ()  # the first block is SampleOrder's pass
        return first + self._seeded(PASS, self._live[k], number, *further).permutation(size)


class StreamLengths:
    """Tokens of a source's samples, looked up as in an array."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        return self._source.lengths_of(index)


class StreamPacks(PackStream):
    """Packs of samples that are still being read. Asked for one pack, it reads as far as the whole step needs: ranks
    that do not read themselves wait for the others' packs of the same step."""

    def __init__(
        self,
        order: StreamOrder,
        sources: Sequence[StreamSource],
        max_seq_len: int,
        packs_per_step: int,
        steps: int,
        **options: Any,
    ) -> None:
        super().__init__(order, (), max_seq_len, **options)
        self.lengths = [StreamLengths(source) for source in sources]  # type: ignore[misc]
        self._per_step, self._steps = packs_per_step, steps
        self._growing = RLock()  # held while rows are read; packs that are known can be had meanwhile

    def __getitem__(self, number: int) -> Members:
        last = number - number % self._per_step + self._per_step - 1
        if self._first[-1] <= last:
            with self._growing:
                while self._first[-1] <= last:
                    self._advance()
        return super().__getitem__(number)

    def count_packs(self, epochs: float = 1) -> int:
        """Those of the run: how many an epoch has is not known."""
        return self._steps * self._per_step

    def _epoch_of(self, order: DrawOrder) -> int:
        return 0  # not known

    def _left(self, start: int, wanted: int) -> int:
        assert isinstance(self.order, StreamOrder)
        return self.order.left(start, wanted)
