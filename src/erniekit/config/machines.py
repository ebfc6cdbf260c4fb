"""How many machines a run is started on: by its keys, else by the environment that job scripts set. Used by
launch/plan.py, cli/train.py and recipes/rehearse_command.py."""

from __future__ import annotations

import os
from collections.abc import Mapping

from erniekit.config.run import RunConfig
from erniekit.errors import ConfigError


def machines(cfg: RunConfig, env: Mapping[str, str] | None = None) -> int:
    return cfg.launch.nnodes or whole_number(os.environ if env is None else env, "NNODES", 1)


def whole_number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; expected a whole number", where="environment", fix=f"unset {name}")
    return int(text)
