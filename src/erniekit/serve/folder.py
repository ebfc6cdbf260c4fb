"""Which folder a run's keys mean, and the model's stop token ids. Used by loaded_models.py and chat.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.config import RunConfig, need
from erniekit.config.sources import BARE
from erniekit.errors import ConfigError
from erniekit.files.listed import has_file

if TYPE_CHECKING:
    from erniekit.api_load import Found


def choose_folder(cfg: RunConfig) -> tuple[str, str | None]:
    """(folder to open, base below it). A recipe means what it trained, when there is something; a typed DIR itself."""
    from erniekit.export.plan import adapter_in, starts_training
    from erniekit.export.source import find_source

    model = cfg.model.model_name_or_path
    typed_model = cfg.origin("model_name_or_path") == BARE
    if cfg.typed("output_dir") and (typed_model or cfg.typed("lora_path")):
        other = "lora_path" if cfg.typed("lora_path") else "model_name_or_path"
        raise ConfigError(
            f"output_dir and {other} both name what to open",
            where="command line",
            fix="give one of them: the folder of a run, or a model or adapter",
        )
    if cfg.lora.lora_path and not starts_training(cfg):
        return str(adapter_in(cfg.lora.lora_path[0], cfg.model.download_hub)), model
    if not typed_model and cfg.given("output_dir"):
        trained = find_source(Path(str(cfg.train.output_dir)).expanduser())
        if trained is not None:
            return str(trained.path), model if trained.is_adapter else None
    need(cfg, "model_name_or_path")
    return str(model), None


def stop_ids(found: Found) -> list[int]:
    """Ends the model's own files name; a chat release may list more than its tokenizer's one eos."""
    from erniekit.checkpoint.model_folder import read_json

    out: list[int] = []
    places = [folder / "generation_config.json" for folder in (found.adapter, found.weights.path) if folder]
    side = next((file for file in places if has_file(file.parent, file.name)), None)
    side_config = read_json(side) if side else {}
    for source in (found.weights.config_json, side_config):
        ends = source.get("eos_token_id")
        out += [id for id in (ends if isinstance(ends, list) else [ends]) if isinstance(id, int)]
    return [id for id in out if 0 <= id < found.weights.config.vocab_size]
