"""`mix_schedule`: which shares the files of a mixture have from which step on. Used by rules/order.py and
sections/data.py.

Written as step=share/share/..., a share for each file: 500=0.5/0.5,2000=0.2/0.8.
"""

from __future__ import annotations

from collections.abc import Sequence

from erniekit.errors import ConfigError

Stage = tuple[int, tuple[float, ...]]  # the first step with these shares, counted from 1
_EXAMPLE = "write step=share/share, e.g. 500=0.5/0.5,2000=0.2/0.8"


def stages_of(entries: Sequence[str], origin: str = "mix_schedule") -> tuple[Stage, ...]:
    """In their order; steps must rise."""
    out: list[Stage] = []
    for entry in entries:
        step, equals, shares = str(entry).partition("=")
        try:
            stage = int(step), tuple(float(share) for share in shares.split("/"))
        except ValueError:
            raise ConfigError(f"{entry!r} is not a stage of a mixture", where=origin, fix=_EXAMPLE) from None
        if not equals or stage[0] < 1 or not all(0 <= share < float("inf") for share in stage[1]) or not sum(stage[1]):
            what = f"{entry!r}: steps are 1 or more, shares 0 or more and not all 0"
            raise ConfigError(what, where=origin, fix=_EXAMPLE)
        if out and stage[0] <= out[-1][0]:
            raise ConfigError(f"step {stage[0]} comes after step {out[-1][0]}", where=origin, fix="let steps rise")
        out.append(stage)
    return tuple(out)
