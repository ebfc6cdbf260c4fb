"""Whether Triton kernels can be built here, and which optional libraries of kernels load. Used by every file that has
or calls one, and by recipes/speed_decisions.py."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch

from erniekit import capabilities
from erniekit.early_imports import without_collections, without_jax
from erniekit.kernels import broken
from erniekit.kernels.lazy_compiler import compiler_on_first_use

Function = TypeVar("Function", bound=Callable[..., Any])
IMPORT_SECONDS: dict[str, float] = {}  # of optional libraries, where a run's start can see them


def loaded(name: str, *needed: str, package: str = "") -> ModuleType | None:
    """An optional module that has all it is wanted for; None where it is not installed or does not load. package: what
    it is installed as; prints a line where it is there and does not load."""
    began = time.perf_counter()
    try:
        with without_collections(), without_jax(), compiler_on_first_use():
            module = import_module(name)
        IMPORT_SECONDS[name] = round(time.perf_counter() - began, 2)
        if missing := [each for each in needed if not hasattr(module, each)]:
            raise ImportError(f"{name} has no {missing[0]}")
    except Exception as problem:  # a version that does not fit the driver, Python or torch raises whatever it likes
        if package and installed(package):
            broken.report(package, problem)
        return None
    return module


def installed(package: str) -> bool:
    """Whether a package is there, by the name it is installed under: importing one of kernels takes seconds."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


if find_spec("torch_xmlir") is not None:  # Kunlunxin's: has to come before the first question to torch.cuda
    loaded("torch_xmlir")


@cache
def _why_not_built() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "no C compiler, with which Triton builds what starts its kernels; apt install gcc"
    if torch.cuda.is_available() and loaded("triton", "jit") is None:
        return "triton does not load"
    return None


def why_no_triton() -> str | None:
    """Why Triton kernels cannot run: nothing to build them with, or one was tried on this device; None: they can."""
    return _why_not_built() or capabilities.why_not("triton")


_BUILT = _why_not_built() is None  # a constant, for functions that are compiled


def has_triton() -> bool:
    return _BUILT and capabilities.has("triton")


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can take it. Steps that have one implementation for a card and one in torch go by this
    alone."""
    return tensor.is_cuda and has_triton()


def shapes_of(name: str) -> Callable[[Function], Function]:
    """Decorator of what an operator returns when it is traced: tensors of the right shapes, without memory."""
    made: Callable[[Function], Function] = torch.library.register_fake(name)
    return made
