"""What a run reads, by key: the folders and files its output must stay clear of. Called by
recipes/output_folder.py and webui/forms.py."""

from __future__ import annotations

from erniekit.config.run import RunConfig

_FOLDERS = ("model_name_or_path", "tokenizer_name")
_FILES = ("train_dataset_path", "eval_dataset_path", "text_dataset_path")


def input_folders(cfg: RunConfig) -> dict[str, str]:
    adapter = {"lora_path": cfg.lora.lora_path[0]} if cfg.lora.lora_path else {}  # a run starts from one
    return {name: str(cfg[name]) for name in _FOLDERS if cfg[name]} | adapter


def input_files(cfg: RunConfig) -> dict[str, tuple[str, ...]]:
    return {name: tuple(cfg[name]) for name in _FILES if cfg[name]}
