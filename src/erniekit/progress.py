"""How far long work is: a bar with the time left on a terminal, a line now and then in a file or a pipe."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

EVERY = 15.0  # seconds from line to line where there is no terminal


class WorkProgress:
    """Short work shows nothing. what: e.g. `tokenising rows.jsonl`; total: None where it is not known."""

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        *,
        out: TextIO | None = None,
        every: float = EVERY,
        delay: float = 2,
    ) -> None:
        self.out = out or sys.stderr
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.done = 0
        self._shown = os.environ.get("RANK", "0") == "0"
        self._began = self._printed_at = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, delay=delay, leave=False, file=self.out)
            if self._shown and self.out.isatty()
            else None
        )

    def add(self, count: int = 1) -> None:
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
        self.print_line()

    def print(self, line: str) -> None:
        """A result that is known before the work is done, above the bar."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def print_line(self) -> None:
        """Prints a line, where `every` seconds have passed since the last one."""
        now = time.monotonic()
        if self._bar is None and self._shown and now - self._printed_at >= self.every:
            self._printed_at = now
            print(self.line(now - self._began), file=self.out, flush=True)

    def line(self, seconds: float) -> str:
        of = f" of {self.total:,}" if self.total else ""
        out = f"{self.what}: {self.done:,}{of} {self.unit} in {seconds:,.0f} s"
        if self.total and 0 < self.done < self.total:
            out += f", about {seconds * (self.total - self.done) / self.done:,.0f} s left"
        return out

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
