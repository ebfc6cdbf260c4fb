"""Updates inside the backward pass: each weight as soon as its gradient is complete, which is then freed, so that no
more than a layer's gradients are ever held. For train/step.py (`update_in_backward`) and recipes/doctor.py.

The norm of all gradients is known only when all updates are made, so gradients cannot be clipped by it. What stands in
for it is the norm of the last sound step (a run's first step is computed twice, the first time for its norm only), or
each tensor's own.

Where a gradient holds values that are not numbers, only that tensor is left as it is; the step counts as a bad one.
Where the loss is not a number, nothing is changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from erniekit.kernels.adamw import norm_reference
from erniekit.optim.adamw import AdamW


class BackwardUpdates:
    def __init__(self, optimizer: AdamW, limit: float, per_tensor: bool = False) -> None:
        """limit: max_grad_norm; 0 or less clips nothing. per_tensor: of each tensor's own norm."""
        self.optimizer, self.limit, self.per_tensor = optimizer, limit, per_tensor
        self._lr: float | None = None  # None: no step is under way, and gradients stay as they are
        self._sound = torch.ones(())
        self._norms: list[torch.Tensor] = []
        # In which order gradients were completed, in this step and the one before: states in host memory come ahead.
        self._order: list[str] = []
        self._before: list[str] = []
        self._handles = after_gradients(optimizer, self._ready)

    @property
    def needs_norm(self) -> bool:
        """Before a run's first step: a backward pass within `measured` gives the norm that it clips by."""
        return self.limit > 0 and not self.per_tensor and self.optimizer.last_norm is None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within: a backward pass that changes nothing and leaves no gradient, but for its norm."""
        norms: list[torch.Tensor] = []
        with each_gradient(self.optimizer, lambda name, grad: norms.append(self.optimizer.norm_of(name, grad))):
            yield
        self.optimizer.last_norm = norm_reference(norms)

    def begin(self, lr: float) -> None:
        self._lr, self._norms = lr, []
        self._before, self._order = self._order, []

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Of the step, before its backward pass."""
        self._sound = loss.detach().isfinite().float()
        self.optimizer.expect(self._next())

    def end(self) -> torch.Tensor:
        """After the backward pass: the norm of all gradients."""
        self._lr = None
        norm = norm_reference(self._norms)
        last = self.optimizer.last_norm
        sound = norm.isfinite() & (self._sound.to(norm.device) > 0)
        self.optimizer.last_norm = torch.where(sound, norm, torch.full_like(norm, torch.nan) if last is None else last)
        return norm

    def _ready(self, name: str) -> None:
        if self._lr is None:
            return
        grad = self.optimizer.gradient_of(name)
        if grad is None:
            return
        sound = self._sound.to(grad.device)
        last = None if self.per_tensor else self.optimizer.last_norm
        checked = self.optimizer.check(name, grad, last, sound, self.limit)
        self._norms.append(checked.norm)
        self._order.append(name)
        scale = checked.scale if self.limit > 0 else None
        self.optimizer.update_one(name, self._lr, scale, checked.good, sound, self._next())

    def _next(self) -> list[str]:
        """Parameters whose gradients will be complete next, by the order of the step before."""
        at = len(self._order)
        if self._before[at - 1 : at] != self._order[-1:]:
            return []
        return self._before[at : at + self.optimizer.home.ahead]


def after_gradients(optimizer: AdamW, ready: Callable[[str], None]) -> list[RemovableHandle]:
    """`ready(name)` whenever backward completes a parameter's gradient. `ready`'s object is not kept alive by it."""
    method = weakref.WeakMethod(ready) if hasattr(ready, "__self__") else lambda: ready

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def call(param: torch.Tensor) -> None:
            if (now := method()) is not None:
                now(name)

        return call

    return [p.register_post_accumulate_grad_hook(hook(name)) for name, p in optimizer.params.items()]


class GradientFacts(NamedTuple):
    """What is kept of a gradient that was freed; on its device."""

    any: torch.Tensor  # an element is not zero
    finite: torch.Tensor  # all are numbers


def facts_of(grad: torch.Tensor) -> GradientFacts:
    return GradientFacts(grad.any(), grad.isfinite().all())


@contextmanager
def seen_gradients(optimizer: AdamW) -> Iterator[dict[str, GradientFacts]]:
    """Within: backward passes change nothing and leave no gradient; of each parameter that got one, what it was."""
    found: dict[str, GradientFacts] = {}

    def look(name: str, grad: torch.Tensor) -> None:
        found[name] = facts_of(grad)

    with each_gradient(optimizer, look):
        yield found


@contextmanager
def each_gradient(optimizer: AdamW, look: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Within: every gradient is read once it is complete, and freed."""

    def ready(name: str) -> None:
        if (grad := optimizer.gradient_of(name)) is not None:
            look(name, grad)
            optimizer.drop_gradient(name)

    handles = after_gradients(optimizer, ready)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
