"""erniekit: train, compress, export and serve ERNIE-4.5 and Llama class models. Importing it imports no torch.

`load` opens a model, `train` trains one, `run` is any other command; docs/python-api.md shows them in use and
docs/api-reference.md lists everything.
"""

from __future__ import annotations

# isort: off
import erniekit.first_interrupt  # noqa: F401 - before typing, which takes its time

# isort: on
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from erniekit.version import __version__

__all__ = [
    "ErnieKitError", "Generation", "Hook", "Model", "StepResult", "Tracker", "TrainingRun", "__version__", "load",
    "plugins", "run", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from erniekit.api import (
        ErnieKitError,
        Generation,
        Hook,
        Model,
        StepResult,
        Tracker,
        TrainingRun,
        load,
        plugins,
        run,
        train,
    )


class _CallableModule(ModuleType):
    """`erniekit.train` is both the function and the package of the training loop, whose name came first: the package is
    called like the function, and shows its signature and its help."""

    def __call__(self, *args: Any, **keys: Any) -> TrainingRun:
        return _train()(*args, **keys)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(_train())

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return _train().__doc__


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a package here when it is first imported, whoever imports it."""
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def _train() -> Any:
    from erniekit.api import training

    return training.train


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("erniekit.train")
    if name in __all__:
        from erniekit import api

        return getattr(api, name)
    raise AttributeError(f"module 'erniekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})


sys.modules[__name__].__class__ = _Package
