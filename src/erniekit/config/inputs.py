"""What a run reads, by key: the folders and files its output must stay clear of. For recipes/, cli/ and the page."""

from __future__ import annotations

from erniekit.config.run import RunConfig

_FOLDERS = ("model_name_or_path", "tokenizer_name", "lora_path")
_FILES = ("train_dataset_path", "eval_dataset_path", "text_dataset_path")


def input_folders(cfg: RunConfig) -> dict[str, str]:
    return {name: str(cfg[name]) for name in _FOLDERS if cfg[name]}


def input_files(cfg: RunConfig) -> dict[str, tuple[str, ...]]:
    return {name: tuple(cfg[name]) for name in _FILES if cfg[name]}
