"""The Python interface: what the command line does, a notebook can. `erniekit.NAME` is `erniekit.api.NAME`.

NAMES is all of it, each imported when it is first used: `import erniekit` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from erniekit.api.installed import plugins
    from erniekit.api.model import Generation, Model, load
    from erniekit.api.run_folder import TrainingRun
    from erniekit.api.training import train
    from erniekit.errors import ErnieKitError
    from erniekit.recipes.run import run
    from erniekit.track import Tracker
    from erniekit.train.hooks import Hook
    from erniekit.train.step import StepResult

__all__ = [
    "NAMES", "ErnieKitError", "Generation", "Hook", "Model", "StepResult", "Tracker", "TrainingRun", "load", "plugins",
    "run", "train",
]  # fmt: skip
NAMES = {
    "ErnieKitError": "erniekit.errors",
    "Generation": "erniekit.api.model",
    "Hook": "erniekit.train.hooks",
    "Model": "erniekit.api.model",
    "StepResult": "erniekit.train.step",
    "Tracker": "erniekit.track",
    "TrainingRun": "erniekit.api.run_folder",
    "load": "erniekit.api.model",
    "plugins": "erniekit.api.installed",
    "run": "erniekit.recipes.run",
    "train": "erniekit.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'erniekit.api' has no attribute {name!r}")
    return getattr(import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(NAMES)
