"""Operators whose bodies launch Triton kernels, for swiglu.py and rope_qkv.py.

Called as they are, they are plain operators. Before layers are compiled, `see_into_kernels` gives each a second one,
whose kernels torch's compiler takes in as they are, so that they cost the host nothing of their own there. Not at
import: to look for kernels in an operator torch imports its compiler (seconds), which other layers never need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from erniekit.kernels.available import has_triton

Body = Callable[..., Any]  # (launcher, *arguments): a kernel is launched as launcher(kernel)[grid](...)
_LIBRARY = torch.library.Library("erniekit", "FRAGMENT")
_EVERY: list[KernelOp] = []


class KernelOp:
    """signature: a function with the operator's arguments and their types, which returns its outputs with memory but
    without values. body: the same outputs, filled."""

    def __init__(self, name: str, signature: Callable[..., Any], body: Body) -> None:
        self.name, self.signature, self.body = name, signature, body
        self._autograd: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        _LIBRARY.define(name + torch.library.infer_schema(signature, mutates_args=()))
        _LIBRARY.impl(name, lambda *given: body(_as_it_is, *given), "CompositeExplicitAutograd")
        torch.library.register_fake(f"erniekit::{name}")(signature)
        self.called: Callable[..., Any] = getattr(torch.ops.erniekit, name).default
        _EVERY.append(self)

    def __call__(self, *given: Any) -> Any:
        return self.called(*given)

    def register_autograd(self, gradient: Callable[..., Any], keep: Callable[..., Any]) -> None:
        self._autograd = gradient, keep
        torch.library.register_autograd(f"erniekit::{self.name}", gradient, setup_context=keep)

    def open(self) -> None:
        def seen(*given: Any) -> Any:
            return self.body(torch.library.wrap_triton, *given)

        seen.__signature__ = inspect.signature(self.signature)  # type: ignore[attr-defined]  # torch reads its types
        made: Any = torch.library.triton_op(f"erniekit::{self.name}_seen", seen, mutates_args=())
        if self._autograd is not None:
            gradient, keep = self._autograd
            made.register_autograd(gradient, setup_context=keep)
        self.called = getattr(torch.ops.erniekit, f"{self.name}_seen").default


def see_into_kernels() -> None:
    """For layers that are about to be compiled, once in a process; where no kernel runs they stay as they are."""
    while _EVERY and has_triton() and torch.cuda.is_available():
        _EVERY.pop().open()


def _as_it_is(kernel: Any) -> Any:
    return kernel
