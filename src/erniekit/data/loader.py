"""Steps of micro-batches for one data-parallel rank, made ahead by threads; one integer resumes them.

recipes/ builds a BatchLoader, the trainer iterates it and saves `state()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import numpy as np

from erniekit import heartbeat
from erniekit.data.collate import collate, collate_joined
from erniekit.data.pack import Members
from erniekit.data.types import IGNORE, Batch, Pack, Sample


class SampleSource(Protocol):
    def sample(self, index: int) -> Sample: ...


class PackOrder(Protocol):
    """Which samples make pack p: a PackStream, or the RowStream of pre-training."""

    epochs: int | None  # None: there is always a next pack

    def __getitem__(self, number: int, /) -> Members: ...
    def __len__(self) -> int: ...


class BatchLoader:
    """Each item is one optimiser step: this rank's `accumulation` micro-batches of `batch_size` packs.

    Step k takes packs [k * G, (k + 1) * G), G = batch_size * accumulation * dp_size: the same set for any
    number of ranks with the same G. A bounded stream ends with a shorter step; a rank that has no pack there
    gets an untrained one, so that all ranks make the same number of calls. It is for one pass: an evaluation
    builds a new loader over the same stream. `collate` makes the batches: collate.py's, or preference_collate.py's.
    """

    def __init__(
        self,
        stream: PackOrder,
        sources: Sequence[SampleSource],
        batch_size: int,
        accumulation: int = 1,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_pack: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        pad_id: int = 0,
        pad_multiple: int = 8,
        pad_to: int | None = None,
        lengths: Sequence[int] = (),
        steps: int | None = None,
        collate: Callable[..., Batch] = collate,
        noise: Callable[[Batch, Sequence[Pack]], Batch] | None = None,
    ) -> None:
        """lengths: rows of a micro-batch are joined and padded to one of these, instead of to `pad_to` each.
        steps: no more are prepared. noise: adds to a batch what its embeddings get in training (embedding_noise.py)."""
        assert 0 <= dp_rank < dp_size
        self.stream, self.sources = stream, sources
        self.batch_size, self.accumulation = batch_size, accumulation
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.num_workers, self.prefetch = num_workers, prefetch
        self._collate = collate
        self._padding: dict[str, Any] = {"pad_id": pad_id, "pad_multiple": pad_multiple, "pad_to": pad_to}
        if lengths:
            self._collate = partial(collate_joined, lengths=lengths, collate=collate)
            self._padding = {"pad_id": pad_id}
        self._noise = noise
        self._consumed = start_pack
        self._end = len(stream) if stream.epochs is not None else None
        self._until = None if steps is None else start_pack + steps * self.packs_per_step
        self._pool: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()

    @property
    def packs_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.dp_size

    def state(self) -> dict[str, int]:
        """Packs in the steps handed out so far, of all ranks; what is only prefetched does not count."""
        return {"packs": self._consumed}

    def __len__(self) -> int:
        """Steps left in a bounded stream."""
        if self._end is None:
            raise TypeError("this loader has no end")
        return max(0, -(-(self._end - self._consumed) // self.packs_per_step))

    def __iter__(self) -> Iterator[list[Batch]]:
        if not self.num_workers:
            while self._goes_on(self._consumed):
                yield self._hand_out(self._step(self._consumed))
            return
        self.close()
        self._pool = pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="erniekit-data")
        ahead: deque[Future[list[Batch]]] = deque()
        planned = self._consumed
        try:
            while True:
                while len(ahead) < self.num_workers + self.prefetch and self._goes_on(planned):
                    ahead.append(pool.submit(self._step, planned))
                    planned += self.packs_per_step
                if not ahead:
                    return
                yield self._hand_out(heartbeat.awaited(ahead.popleft(), self._threads))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Stop the threads; what they had made ahead is dropped."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _hand_out(self, step: list[Batch]) -> list[Batch]:
        self._consumed += self.packs_per_step
        if self._end is not None:
            self._consumed = min(self._consumed, self._end)
        return step

    def _goes_on(self, pack: int) -> bool:
        return not self._at_end(pack) and (self._until is None or pack < self._until)

    def _at_end(self, pack: int) -> bool:
        return self._end is not None and pack >= self._end

    def _step(self, first: int) -> list[Batch]:
        self._threads.add(get_ident())
        per_call = self.batch_size * self.dp_size  # packs that all ranks together take in one micro-batch
        calls = range(first, first + self.packs_per_step, per_call)
        return [self._micro_batch(call + self.dp_rank * self.batch_size) for call in calls if not self._at_end(call)]

    def _micro_batch(self, first: int) -> Batch:
        packs = [self._pack(p) for p in range(first, first + self.batch_size) if not self._at_end(p)]
        if not packs:
            assert self._end is not None
            packs = [_untrained(self._pack(self._end - 1))]
        batch = self._collate(packs, **self._padding)
        return batch if self._noise is None else self._noise(batch, packs)

    def _pack(self, number: int) -> Pack:
        members = self.stream[number]
        return Pack(tuple(self.sources[s].sample(i) for s, i in members), number)


def _untrained(pack: Pack) -> Pack:
    samples = (replace(sample, labels=np.full_like(sample.labels, IGNORE)) for sample in pack.samples)
    return Pack(tuple(samples), pack.index)
