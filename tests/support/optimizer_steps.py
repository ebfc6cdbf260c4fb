"""How many updates an optimiser has made, from the state it keeps of its first parameter."""

from __future__ import annotations

from erniekit.optim.adamw import AdamW


def steps_taken(optimizer: AdamW) -> int:
    return next((int(state["step"]) for state in optimizer._states.values()), 0)
