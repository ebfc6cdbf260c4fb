"""Imports of kernels' libraries that leave torch's compiler for its first use. Used by available.py.

flash-attn-4 and quack-kernels call torch.compile, torch.compiler.disable and torch._dynamo for functions of theirs
while they are imported, and each of the three imports the compiler: five seconds, and none of those functions is
called here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

COMPILER = "torch._dynamo"
_compile = torch.compile
_disable: Callable[..., Any] = torch.compiler.disable


@contextmanager
def compiler_on_first_use() -> Iterator[None]:
    """What is marked for the compiler inside is handed to it when it is first called; where the compiler has been
    imported already nothing changes."""
    if COMPILER in sys.modules:
        yield
        return
    marks = _Marks()
    torch.compile, torch.compiler.disable, torch._dynamo = later_compiled, later_disabled, marks  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = _compile, _disable
        if torch.__dict__.get("_dynamo") is marks:
            del torch._dynamo  # torch then imports it for whoever asks


class _Marks:
    """In place of torch._dynamo: how it marks a function, which needs nothing of it. All else is its own."""

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        function._dynamo_marked_constant = True
        return function

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        return getattr(import_module(COMPILER), name)


def later_compiled(model: Any = None, *, recompile_limit: int | None = None, **settings: Any) -> Any:
    """torch.compile, once it is called. recompile_limit: an argument since torch 2.13, without effect before."""
    if model is None:
        return functools.partial(later_compiled, recompile_limit=recompile_limit, **settings)
    if recompile_limit is not None and "recompile_limit" in (_compile.__kwdefaults__ or {}):
        settings["recompile_limit"] = recompile_limit
    return _at_first_call(model, lambda: _compile(model, **settings))


def later_disabled(fn: Any = None, *given: Any, **settings: Any) -> Any:
    """torch.compiler.disable, once it is called and there is something to be kept from it."""
    if fn is None:
        return functools.partial(later_disabled, **settings)
    return _at_first_call(fn, lambda: _disable(fn, *given, **settings) if COMPILER in sys.modules else None)


def _at_first_call(function: Any, make: Callable[[], Any]) -> Any:
    """function, until `make` returns what takes its place."""
    made: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **keys: Any) -> Any:
        if not made and (one := make()) is not None:
            made.append(one)
        return (made[0] if made else function)(*args, **keys)

    return call
