"""ModelSpec: everything the rest of the house asks of a model family. Each models/*.py exports one as SPEC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erniekit.models.config import DecoderConfig
from erniekit.parallel.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from erniekit.models.names import Entry


@dataclass(frozen=True)
class ModelSpec:
    name: str
    # config.json dict, layout it was found beside, whether the files hold an lm_head, where (for errors)
    read_config: Callable[[dict[str, Any], str, bool, str], DecoderConfig]
    write_config: Callable[[DecoderConfig, str, str], dict[str, Any]]  # config, layout, dtype name
    build: Callable[[DecoderConfig], nn.Module]
    plan: Plan  # how its weights shard: the table parallel/ works from
    names: Callable[[DecoderConfig, str], list[Entry]]  # our tensors <-> a layout's tensors
    lora_targets: tuple[str, ...]  # public projection names adapted by default
    paddle_prefix: str  # first word of this family's Paddle tensor names
