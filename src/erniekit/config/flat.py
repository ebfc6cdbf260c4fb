"""The flat namespace: every key and alias by name, and flat values -> typed sections. Used by all of config/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.config.field import Key, keys_of
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.config.paddleformers import RENAMED
from erniekit.config.sections import SECTIONS
from erniekit.registry import nearest

KEYS: dict[str, Key] = {k.name: k for section, cls in SECTIONS.items() for k in keys_of(section, cls)}
ALIASES: dict[str, str] = {**{alias: k.name for k in KEYS.values() for alias in k.also}, **RENAMED}
DEFAULTS: dict[str, Any] = {name: k.default for name, k in KEYS.items()}
DEGREES = tuple(name for name in KEYS if name.endswith("_degree") and name != "server_tp_degree")

# Names used by other toolkits.
ELSEWHERE = {
    "cutoff_len": "max_seq_len",
    "sequence_len": "max_seq_len",
    "max_length": "max_seq_len",
    "dataset": "train_dataset_path",
    "datasets": "train_dataset_path",
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "micro_batch_size": "batch_size",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "finetuning_type": "fine_tuning",
    "lora_r": "lora_rank",
    "lora_target": "lora_target_modules",
    "target_modules": "lora_target_modules",
    "gradient_checkpointing": "recompute",
    "weight_format": "save_format",
    "steps": "max_steps",
}


def canonical(name: str) -> str:
    """The declared name of a key however it was written: dashes, an alias. Unknown names are returned as they are."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def is_known(name: str) -> bool:
    name = canonical(name)
    return name in KEYS or name in IGNORED_KEYS


def suggest(name: str) -> list[str]:
    """Known names for a mistyped one, best first."""
    name = name.replace("-", "_")
    if name in ELSEWHERE:
        return [ELSEWHERE[name]]
    return nearest(name, [*KEYS, *ALIASES, *IGNORED_KEYS], count=2)


def build(values: Mapping[str, Any]) -> dict[str, Any]:
    """Section name -> section, from a full set of flat values."""
    return {
        section: cls(**{k.name: values[k.name] for k in KEYS.values() if k.section == section})
        for section, cls in SECTIONS.items()
    }
