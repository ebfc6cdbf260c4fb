"""Which weights Muon steps, by name and shape. Called by recipes/, for plans as well, which make no optimiser."""

from __future__ import annotations

from collections.abc import Sequence

INSIDE = ("layers.", "mtp.")  # names of weights between embedding and head


def by_muon(name: str, shape: Sequence[int]) -> bool:
    inside = name.startswith(INSIDE) and name.endswith(".weight")
    return inside and len(shape) == 2 and ".router." not in name and ".lora." not in name
