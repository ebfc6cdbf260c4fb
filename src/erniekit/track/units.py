"""Numbers as people read them, with their units. Used by the console, the progress bar and the report."""

from __future__ import annotations

import math


def metric_text(name: str, value: float | None) -> str:
    """One metric by ERNIEKit's name: memory in GiB, runtimes in s, mfu in percent, the rest as it is."""
    if value is None or not math.isfinite(value):
        return "not finite" if value is None else str(value)
    if name.startswith("progress") or name == "epoch":
        return f"{value:.4f}"
    if "memory" in name:
        return f"{value:.2f} GiB"
    if name.endswith("runtime"):
        return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
    if name == "mfu":
        return f"{value:.1%}"
    if name.endswith("learning_rate"):
        return f"{value:.4g}"
    if name == "loss" or name.endswith("_loss"):
        return f"{value:.6f}"
    if name.endswith("tokens_per_second"):
        return f"{value:.0f}"
    return f"{value:.5g}"


def short(value: float) -> str:
    """A few characters for an axis or a bar: 12.3k, 4.1M, 0.0021, 1e-05."""
    size = abs(value)
    for bound, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= bound:
            divisor = 1e3 if suffix == "k" else bound
            return f"{value / divisor:.4g}{suffix}"
    return scientific(value) if size != 0 and size < 1e-3 else f"{value:.4g}"


def scientific(value: float) -> str:
    """1e-5, 9.5e-4."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def duration(seconds: float) -> str:
    """1:02:03, 02:03 under an hour, 3d 04:05 from a day on."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"
