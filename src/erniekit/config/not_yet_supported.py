"""Keys and values not supported yet: accepted in every recipe, refused by name when it is run.

`not_yet_supported(cfg)` lists what a run would need; the recipes call `refuse_not_yet_supported(cfg)` before they start
any work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from erniekit.config.note import shown
from erniekit.errors import NotYetSupportedError
from erniekit.weight_kinds import SERVED

if TYPE_CHECKING:
    from erniekit.config.run import RunConfig


@dataclass(frozen=True)
class NotYetSupported:
    """One value that requests something this version does not have."""

    what: str
    key: str
    value: Any
    origin: str
    today: str
    stops: bool  # False: the run goes on without it and gives the same result

    def __str__(self) -> str:
        return f"{self.what}: {self.key} is {shown(self.value)} ({self.origin}); {self.today}"


@dataclass(frozen=True)
class _Row:
    keys: tuple[str, ...]
    applies: Callable[[Any], bool]
    what: str
    today: str
    stops: bool = True
    item: str = ""  # of a key that holds several: the one unsupported item
    not_for: str = ""  # a stage that has it already


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: value in values


def _has(item: str) -> Callable[[Any], bool]:
    return lambda items: item in items


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _fp8(model_config: Mapping[str, Any] | None) -> bool:
    return any((model_config or {}).get(name) for name in ("use_fp8_mlp", "use_fp8_fuse_node"))


SPREAD = (
    "tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree", "data_parallel_degree",
    "context_parallel_degree",
)  # fmt: skip

# The commands that would need it -> what they would need. Adding the capability takes its line away.
LIST: dict[tuple[str, ...], tuple[_Row, ...]] = {
    ("train", "eval", "doctor"): (
        _Row(("stage",), _one_of("OCR-VL-SFT"), "training of OCR models", "VL-SFT trains ERNIE-4.5-VL"),
        _Row(("compute_type",), _one_of("fp16"), "fp16 training", "use bf16"),
        _Row(("moe_group_experts",), bool, "choosing experts within groups", "leave it out"),
        _Row(("dataset_type",), _one_of("map"), "data packed beforehand", "use iterable"),
        _Row(("split_multi_turn", "encode_one_turn"), bool, "one example per turn", "leave it out"),
        _Row(("use_template",), lambda on: not on, "training on raw text", "use stage: PT", not_for="PT"),
        _Row(
            ("use_global_causal_attn",), bool, "attention across the documents of a pack", "leave it out", not_for="PT"
        ),
        _Row(
            ("model_config",),
            _fp8,
            "fp8 training",
            "put use_fp8_mlp: False there, and use_fp8: True for block-wise fp8 of all layers",
            item="use_fp8_mlp: True",
        ),
    ),
    ("train", "doctor"): (
        _Row(("optim",), _one_of("adafactor", "adamw_mini"), "this optimiser", "use adamw"),
        _Row(
            ("hidden_dropout_prob", "attention_probs_dropout_prob", "moe_dropout_prob"),
            _above(0),
            "dropout",
            "leave it out",
        ),
        _Row(("train_emb_only", "train_moe_only"), bool, "training a part of the model", "use LoRA"),
        _Row(("adaptive_norm_clip",), bool, "clipping by a running norm", "use max_grad_norm"),
        _Row(("ignore_data_skip", "skip_data_intervals"), bool, "resuming elsewhere in the data", "leave it out"),
        _Row(
            ("pipeline_parallel_config",),
            _has("use_dualpipev"),
            "the DualPipeV schedule",
            "pp_schedule chooses among the others",
            stops=False,
            item="use_dualpipev",
        ),
        _Row(
            ("pipeline_parallel_config",),
            _has("forward_backward_overlap_scheduler"),
            "one micro-batch's backward over another's forward",
            "pp_schedule chooses among the others",
            stops=False,
            item="forward_backward_overlap_scheduler",
        ),
    ),
    ("eval",): (_Row(SPREAD, _above(1), "evaluation over several devices", "runs on one", stops=False),),
    ("chat",): (
        _Row(
            ("quantization",),
            lambda item: bool(item) and item not in SERVED,
            "this quantization in the embedded engine",
            f"used as stored; {', '.join(SERVED)} are packed",
            stops=False,
        ),
        _Row(("tensor_parallel_degree",), _above(1), "chat over several devices", "runs on one", stops=False),
    ),
}


def not_yet_supported(cfg: RunConfig, command: str | None = None) -> list[NotYetSupported]:
    """What this run requests that a later version brings; what stops it comes first."""
    command = command or cfg.command
    found = [
        NotYetSupported(row.what, key, row.item or cfg[key], cfg.origin(key), row.today, row.stops)
        for commands, rows in LIST.items()
        if command in commands
        for row in rows
        for key in row.keys
        if row.applies(cfg[key]) and cfg.train.stage != row.not_for
    ]
    return sorted(found, key=lambda item: not item.stops)


def refuse_not_yet_supported(cfg: RunConfig, command: str | None = None) -> None:
    """Stop with a NotYetSupportedError that names everything this run would need; return when it needs nothing."""
    stops = [item for item in not_yet_supported(cfg, command) if item.stops]
    if stops:
        names = list(dict.fromkeys(item.what for item in stops))
        raise NotYetSupportedError(
            f"not in this version: {', '.join(names)}",
            where=", ".join(f"{i.key}={shown(i.value)} ({os.path.basename(i.origin)})" for i in stops),
            fix="; ".join(f"{i.key}: {i.today}" for i in stops),
        )
