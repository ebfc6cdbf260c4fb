"""The one progress bar: tqdm on stderr, whatever else the program prints kept above it. For console.py."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from erniekit.track.units import short

# tqdm's helper thread and its process-wide semaphore are of no use to one bar, and both do badly in forked
# loader workers and after kill -9.
_Bar: Any = type("_Bar", (tqdm,), {"monitor_interval": 0})
_Bar.set_lock(threading.RLock())

FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} ETA {remaining}{postfix}"  # tqdm puts ", " before postfix
REDRAW_S = 0.1  # a human eye's worth: faster steps are drawn together


class Progress:
    """`advance` moves it, `show` sets the numbers at its right, `close` leaves it as it stands."""

    def __init__(self, total: int, start: int = 0, out: TextIO | None = None) -> None:
        self._numbers = self._status = ""
        self._drawn = 0.0
        self._bar = _Bar(
            total=total,
            initial=start,
            file=out or sys.stderr,
            dynamic_ncols=True,
            miniters=1,
            mininterval=REDRAW_S,
            smoothing=0.05,  # steps differ (evaluation, saving): an ETA that jumps is no help
            bar_format=FORMAT,
        )
        self._above: dict[str, _AboveBar] = {}
        for name in ("stdout", "stderr"):
            if getattr(sys, name).isatty():
                self._above[name] = _AboveBar(getattr(sys, name), self._bar)
                setattr(sys, name, self._above[name])

    def advance(self, step: int) -> None:
        if step > self._bar.n:
            self._bar.update(step - self._bar.n)

    def show(self, metrics: Mapping[str, float]) -> None:
        self._numbers = summary(metrics)
        self._redraw()

    def status(self, text: str) -> None:
        self._status = text
        self._redraw(always=True)

    def close(self) -> None:
        for name, above in self._above.items():
            original = above.finish()
            if getattr(sys, name) is above:
                setattr(sys, name, original)
        self._bar.refresh()
        self._bar.close()

    def _redraw(self, always: bool = False) -> None:
        self._bar.set_postfix_str(", ".join(filter(None, (self._status, self._numbers))), refresh=False)
        now = time.monotonic()
        if always or now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._bar.refresh()


def summary(metrics: Mapping[str, float]) -> str:
    """loss 2.315, lr 1.0e-4, 12.3k tok/s, 3.2 GiB, MFU 41%: only what is known, and with a bar in 80 columns."""
    shown = {
        "loss": lambda value: f"loss {value:.3f}",
        "learning_rate": lambda value: f"lr {value:.1e}".replace("e-0", "e-").replace("e+00", ""),
        "tokens_per_second": lambda value: f"{short(float(f'{value:.3g}'))} tok/s",
        "max_memory_allocated": lambda value: f"{value:.1f} GiB" if value < 10 else f"{value:.0f} GiB",
        "mfu": lambda value: f"MFU {value:.0%}",
    }
    return ", ".join(text(metrics[name]) for name, text in shown.items() if name in metrics)


class _AboveBar:
    """A terminal stream while the bar is up: whole lines go above the bar, which is then drawn again."""

    def __init__(self, out: TextIO, bar: Any) -> None:
        self._out, self._bar, self._line = out, bar, ""

    def write(self, text: str) -> int:
        if self._bar is None:
            return self._out.write(text)
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            with self._bar.get_lock():
                self._bar.clear(nolock=True)
                self._out.write(lines + newline)
                self._out.flush()
                self._bar.refresh(nolock=True)
        return len(text)

    def finish(self) -> TextIO:
        """The bar goes away; someone may still hold this stream and write to it. Returns the stream below."""
        if self._line:
            self.write("\n")
        self._bar = None
        return self._out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)
