"""FiniteWatch: whether a loss function of the user's gave nan or inf. Used by own.py and own_preference.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FiniteWatch:
    """Stays on the device: what a step gave is asked for only where its loss or gradient is not a number."""

    def __init__(self) -> None:
        self._failed: torch.Tensor | None = None

    def failed(self) -> bool:
        """Whether the function gave nan or inf, or a gradient with them, from finite numbers since this was last
        asked."""
        found = self._failed is not None and bool(self._failed)
        self._failed = None
        return found

    def see(self, given: Sequence[torch.Tensor], losses: torch.Tensor) -> None:
        """given: what the losses are computed from."""
        sound = torch.stack([one.detach().isfinite().all() for one in given]).all()
        self._note(sound & ~losses.detach().isfinite().all())
        for one in given:
            if one.requires_grad:
                one.register_hook(lambda gradient: self._note(sound & ~gradient.isfinite().all()))

    def _note(self, failed: torch.Tensor) -> None:
        if self._failed is None:
            self._failed = torch.zeros_like(failed)
        self._failed.logical_or_(failed)
