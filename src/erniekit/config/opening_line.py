"""The first line on the screen of a command that takes long, printed before torch or anything heavy is imported.

Called by the commands of recipes/ and serve/; recipes/first_line.py has a training run's own.
"""

from __future__ import annotations

from erniekit.config.run import RunConfig
from erniekit.log import emit, paint
from erniekit.version import __version__


def announce_command(cfg: RunConfig) -> None:
    """Of a command that trains nothing. Where nothing is named there is none: a refusal follows."""
    if what := named_in(cfg):
        announce_work(f"{cfg.command} {what}")


def announce_work(what: str) -> None:
    emit(f"{paint('erniekit', 'bold')} {__version__}  {what}")


def named_in(cfg: RunConfig) -> str:
    """What the command was given, as it was typed: a recipe, or the folder of a model, of adapters or of a run."""
    keys = ("model_name_or_path", "lora_path", "output_dir")
    folders = [cfg[key] for key in keys if cfg.given(key) and cfg[key]]
    first = folders[0] if folders else ""
    return ", ".join(cfg.files) or (first if isinstance(first, str) else ", ".join(first))
