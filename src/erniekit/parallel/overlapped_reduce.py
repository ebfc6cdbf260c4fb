"""Gradients of data-parallel ranks, added up while the backward pass still computes the others. Made by
engine.py.

Buckets are sent in one order on all ranks, from the model's end to its beginning, as backward goes: one whose gradients
are complete waits for those before it. Where a rank has no gradient for a parameter, its bucket goes at the end of the
pass, with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed import ProcessGroup, Work

from erniekit.parallel import comm

BUCKET = 8 * 1024 * 1024  # elements, fp32: long enough for the link's full rate, short enough to begin early


class OverlappedReduce:
    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        group: ProcessGroup,
        gradient_of: Callable[[str], torch.Tensor | None],
        keep: Callable[[str, torch.Tensor], None],
    ) -> None:
        """params: in the order of the model, the same on all ranks. keep: takes the place of a gradient."""
        self.group, self.gradient_of, self.keep = group, gradient_of, keep
        self.shapes = {name: param.shape for name, param in params.items()}
        self.buckets = _buckets({name: shape.numel() for name, shape in reversed(self.shapes.items())})
        self.bucket_of = {name: k for k, names in enumerate(self.buckets) for name in names}
        self.device = next((param.device for param in params.values()), torch.device("cpu"))
        self.sent_early = 0  # buckets of the latest step that went before its backward pass had ended
        self._missing: list[set[str]] = []  # of each bucket, gradients that are still to come
        self._sent: list[Work] = []
        self._begun = False

    def begin(self) -> None:
        """Before the backward pass of a step's last micro-batch."""
        self._missing, self._sent, self._begun = [set(names) for names in self.buckets], [], True

    def ready(self, name: str) -> None:
        """A parameter's gradient is complete."""
        if not self._begun or name not in self.bucket_of:
            return
        self._missing[self.bucket_of[name]].remove(name)  # KeyError: it was complete before, and may be sent already
        while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
            self._send()

    def finish(self) -> frozenset[str]:
        """After the backward pass: the names whose gradients are sums over all ranks from here on. None where it was
        not begun."""
        if not self._begun:
            return frozenset()
        self._begun, self.sent_early = False, len(self._sent)
        while len(self._sent) < len(self.buckets):
            self._send()
        for work in self._sent:
            work.wait()
        self._sent = []
        return frozenset(self.bucket_of)

    def _send(self) -> None:
        """The next bucket, in memory of its own, which takes the place of its gradients."""
        names = self.buckets[len(self._sent)]
        sizes = [self.shapes[name].numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        parts = [part.view(self.shapes[name]) for name, part in zip(names, flat.split(sizes))]
        grads = [self.gradient_of(name) for name in names]
        if any(grad is None for grad in grads):
            flat.zero_()
        if there := [(part, grad) for part, grad in zip(parts, grads) if grad is not None]:
            torch._foreach_copy_([part for part, _ in there], [grad for _, grad in there])
        for name, part in zip(names, parts):
            self.keep(name, part)
        self._sent.append(comm.start_all_reduce(flat, self.group))


def _buckets(sizes: Mapping[str, int]) -> list[list[str]]:
    out: list[list[str]] = []
    held = BUCKET
    for name, size in sizes.items():
        if held >= BUCKET:
            out.append([])
            held = 0
        out[-1].append(name)
        held += size
    return out
