"""Work for the processes that read media, which import it by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """So many seconds on a processor, without a sign of life."""

    seconds: float

    def work(self, beat: Callable[[], None]) -> float:
        began = time.process_time()
        while (spent := time.process_time() - began) < self.seconds:
            pass
        return spent
