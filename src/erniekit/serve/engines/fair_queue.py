"""The queue of sequences, and which is next: first by client, then by request. Used by scheduling.py.

Every call is under the engine's lock. Max-min fair: the client with the fewest running sequences is next, then its
request with the fewest; among equals the one served longest ago. A request of many sequences therefore
delays others by no more than its fair share does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence

from erniekit.serve.engines.base import TokenStream
from erniekit.serve.engines.sequence import RunningSequence


class FairQueue:
    """limit: sequences that may wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.leaving = False  # whether some here are cancelled
        self._lines: dict[TokenStream, deque[RunningSequence]] = {}
        self._served: dict[Hashable, int] = {}  # client or stream -> when it had its last turn
        self._clock = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def most_counted(self) -> int:
        """How many of one request's sequences count against the limit: one large request does not fill the queue."""
        return max(1, self.limit // 4)

    def accepts(self, stream: TokenStream, running: Sequence[RunningSequence], places: int) -> bool:
        """places: sequences that could run at once. Beyond the limit there is as much space again for clients that have
        nothing here: one client cannot fill the queue for the others."""
        waiting = sum(min(len(line), self.most_counted) for line in self._lines.values())
        wanted = waiting + min(len(stream.jobs), self.most_counted)
        free = max(0, places - len(running))
        if wanted <= self.limit + free:
            return True
        known = any(run.client == stream.client for run in running)
        known = known or any(other.client == stream.client for other in self._lines)
        return not known and wanted <= 2 * self.limit + free

    def add(self, runs: Sequence[RunningSequence]) -> None:
        for run in runs:
            self._line(run).append(run)

    def put_back(self, run: RunningSequence) -> None:
        """It ran already: it goes on before its request's others."""
        self._line(run).appendleft(run)
        self.leaving = self.leaving or run.gone

    def _line(self, run: RunningSequence) -> deque[RunningSequence]:
        for waiter in (run.client, run.stream):
            # Arriving counts as a turn just before the last one given: ahead of the client just served, behind
            # those that have waited longer, however often one leaves and comes again.
            self._served.setdefault(waiter, self._clock - 1)
        return self._lines.setdefault(run.stream, deque())

    def next(self, running: Sequence[RunningSequence]) -> RunningSequence | None:
        if not self._lines:
            return None
        clients, streams = _counts(running)
        client = min(
            (stream.client for stream in self._lines), key=lambda client: (clients[client], self._served[client])
        )
        own = [stream for stream in self._lines if stream.client == client]
        return self._lines[min(own, key=lambda stream: (streams[stream], self._served[stream]))][0]

    def take(self, run: RunningSequence) -> None:
        """The one that `next` gave leaves the queue."""
        line = self._lines[run.stream]
        assert line[0] is run
        line.popleft()
        self._clock += 2
        self._served[run.client] = self._served[run.stream] = self._clock
        self._tidy()

    def drop_gone(self) -> None:
        if self.leaving and any(run.gone for line in self._lines.values() for run in line):
            for stream, line in self._lines.items():
                self._lines[stream] = deque(run for run in line if not run.gone)
            self._tidy()
        self.leaving = False

    def clear(self) -> None:
        self._lines.clear()
        self._served.clear()

    def _tidy(self) -> None:
        self._lines = {stream: line for stream, line in self._lines.items() if line}
        left = {*self._lines, *(stream.client for stream in self._lines)}
        self._served = {waiter: when for waiter, when in self._served.items() if waiter in left}


def in_turn(running: Sequence[RunningSequence]) -> list[RunningSequence]:
    """Those whose client, and then whose request, has the fewest running first."""
    clients, streams = _counts(running)
    return sorted(running, key=lambda run: (clients[run.client], streams[run.stream]))


def over_share(new: RunningSequence, running: Sequence[RunningSequence]) -> RunningSequence | None:
    """The most recently started sequence of a client that holds at least two more than `new` has.

    Each is preempted once at most, so that every sequence ends.
    """
    clients, streams = _counts(running)

    def unfair(run: RunningSequence) -> bool:
        if run.client != new.client:
            return clients[run.client] >= clients[new.client] + 2
        return streams[run.stream] >= streams[new.stream] + 2

    found = [run for run in running if not run.preempted and unfair(run)]
    return _largest(found, clients, streams) if found else None


def youngest_of_largest(running: Sequence[RunningSequence]) -> RunningSequence:
    """Who gives its cache blocks back when there are too few. The oldest never does: something always goes on."""
    return _largest(running[1:] or running, *_counts(running))


def _largest(found: Sequence[RunningSequence], clients: Counter[str], streams: Counter[TokenStream]) -> RunningSequence:
    order = range(len(found))
    return found[max(order, key=lambda k: (clients[found[k].client], streams[found[k].stream], k))]


def _counts(running: Sequence[RunningSequence]) -> tuple[Counter[str], Counter[TokenStream]]:
    return Counter(run.client for run in running), Counter(run.stream for run in running)
