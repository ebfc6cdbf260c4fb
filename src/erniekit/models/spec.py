"""ModelSpec: everything the rest of the project needs of a model family. Each models/*.py exports one as SPEC."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erniekit.errors import ConfigError
from erniekit.models import score_head
from erniekit.models.config import DecoderConfig
from erniekit.models.promised import promised
from erniekit.parallel.plan import Plan
from erniekit.printable import plain

FUNCTIONS = ("read_config", "write_config", "build", "names")
OPTIONAL = ("layout_of", "settle", "preprocessed")

if TYPE_CHECKING:
    import torch
    from torch import nn

    from erniekit.models.names import Entry


@dataclass(frozen=True)
class ModelSpec:
    name: str
    # config.json dict, layout of its weight files, whether the files hold an lm_head, where (for errors)
    read_config: Callable[[dict[str, Any], str, bool, str], DecoderConfig]
    write_config: Callable[[DecoderConfig, str, str], dict[str, Any]]  # config, layout, dtype name
    build: Callable[[DecoderConfig], nn.Module]
    plan: Plan  # how its weights shard: the table parallel/ works from
    names: Callable[[DecoderConfig, str], list[Entry]]  # our tensors <-> a layout's tensors
    lora_targets: tuple[str, ...]  # public projection names adapted by default
    paddle_prefix: str = ""  # first part of this family's Paddle tensor names; empty: it has no such layout
    layout_of: Callable[[Collection[str]], str] | None = None  # from tensor names; None: by the prefix
    settle: Callable[[DecoderConfig, Collection[str]], DecoderConfig] | None = None  # what only the files show
    # from preprocessor_config.json of the folder, on pictures: its fields, and where (for errors)
    preprocessed: Callable[[DecoderConfig, dict[str, Any], str], DecoderConfig] | None = None
    fp32: tuple[str, ...] = ()  # ends of names of weights that stay fp32 in a 16-bit model

    def __post_init__(self) -> None:
        for name in (*FUNCTIONS, *OPTIONAL):
            object.__setattr__(self, name, promised(self.name, name, getattr(self, name)))

    def problem(self) -> str:
        """What of its tables and functions is of another type than is written here; empty: nothing."""
        for name in ("lora_targets", "fp32"):
            found = getattr(self, name)
            if not isinstance(found, tuple) or not all(isinstance(part, str) for part in found):
                return f"has {name}={plain(repr(found), 60)} in its ModelSpec, not a tuple of names"
        if not isinstance(self.plan, dict) or not all(isinstance(pattern, str) for pattern in self.plan):
            return f"has plan={plain(repr(self.plan), 60)} in its ModelSpec, not a dict from patterns to rules"
        odd = next((name for name in FUNCTIONS if not callable(getattr(self, name))), None)
        return f"has {odd}={plain(repr(getattr(self, odd)), 60)} in its ModelSpec, not a function" if odd else ""

    def entries(self, config: DecoderConfig, layout: str) -> list[Entry]:
        """`names`, with the score head of a classifier or reward model in the place of the LM head."""
        self.check_layout(layout)
        found = self.names(config, layout)
        return score_head.entries(found) if config.labels else found

    def check_layout(self, layout: str) -> None:
        """Raises for one that this family does not have."""
        if layout == "paddle" and not self.paddle_prefix:
            raise ConfigError(
                f"models of family {self.name} have no Paddle layout", where="save_format", fix="save_format: hf"
            )

    def config_json(self, config: DecoderConfig, layout: str, dtype: str) -> dict[str, Any]:
        """`write_config`, with a score head's classes."""
        written = self.write_config(config, layout, dtype)
        return score_head.written(written, config.labels) if config.labels else written

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a weight is stored in where the model is in `dtype`."""
        import torch

        return torch.float32 if name.endswith(self.fp32) and self.fp32 else dtype

    def cast(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """model.to(dtype), but for those that stay fp32."""
        import torch

        kept = {
            name: param.detach().to(torch.float32, copy=True)  # a copy: model.to works in place
            for name, param in model.named_parameters()
            if self.fp32 and name.endswith(self.fp32)
        }
        model.to(dtype)
        for name, param in model.named_parameters():
            if name in kept:
                param.data = kept[name]
        return model
