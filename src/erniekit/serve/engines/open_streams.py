"""The requests of an engine that have not ended, and their sequences. Used by embedded.py, under its lock.

A request may have thousands of sequences (an evaluation task), and each of them ends by itself: what is asked here
between two steps does not go through all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from erniekit.serve.engines.base import TokenStream
from erniekit.serve.engines.sequence import RunningSequence


class OpenStreams:
    def __init__(self) -> None:
        self._runs: dict[TokenStream, Sequence[RunningSequence]] = {}
        self._left: Counter[TokenStream] = Counter()  # sequences that have not ended
        self._of_model: Counter[str] = Counter()

    def add(self, stream: TokenStream, runs: Sequence[RunningSequence]) -> None:
        """runs: in the order of their jobs."""
        self._runs[stream] = runs
        self._left[stream] = len(runs)
        self._of_model.update(run.job.model for run in runs)

    def end(self, run: RunningSequence) -> None:
        """It has ended or is cancelled; harmless when it was before."""
        if run.gone:
            return
        run.gone = True
        self._of_model[run.job.model] -= 1
        self._left[run.stream] -= 1
        if not self._left[run.stream]:
            del self._left[run.stream], self._runs[run.stream]

    def open_runs(self, stream: TokenStream, number: int | None = None) -> list[RunningSequence]:
        """Those of a stream that have not ended, or the one of that number."""
        runs = self._runs.get(stream, ())
        return [run for run in (runs if number is None else runs[number : number + 1]) if not run.gone]

    def models(self) -> set[str]:
        """Models that have sequences."""
        return {model for model, count in self._of_model.items() if count}

    def end_all(self) -> list[RunningSequence]:
        """Forgets everything; what had not ended."""
        left = [run for stream in list(self._runs) for run in self.open_runs(stream)]
        self._runs.clear()
        self._left.clear()
        self._of_model.clear()
        return left
