"""Which folder a run's keys mean, and where a model's answers end. Used by shelf.py, for the server and for chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.config import RunConfig, need
from erniekit.errors import ConfigError

if TYPE_CHECKING:
    from erniekit.api_load import Found


def choose_folder(cfg: RunConfig) -> tuple[str, str | None]:
    """(folder to open, base below it). A recipe means what it trained, when there is something; a typed DIR itself."""
    model = cfg.model.model_name_or_path
    if cfg.lora.lora_path:
        return cfg.lora.lora_path, model
    if cfg.origin("model_name_or_path") != "command line" and cfg.given("output_dir"):
        from erniekit.export.source import find_source

        trained = find_source(Path(str(cfg.train.output_dir)).expanduser())
        if trained is not None:
            return str(trained.path), model if trained.is_adapter else None
    need(cfg, "model_name_or_path")
    return str(model), None


def stop_ids(found: Found) -> list[int]:
    """Ends the model's own files name; a chat release may list more than its tokenizer's one eos."""
    out: list[int] = []
    side = found.weights.path / "generation_config.json"
    try:
        told = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"generation_config.json is not JSON: {error}", where=str(side)) from None
    for source in (found.weights.config_json, told):
        ends = source.get("eos_token_id") if isinstance(source, dict) else None
        out += [id for id in (ends if isinstance(ends, list) else [ends]) if isinstance(id, int)]
    return [id for id in out if id < found.weights.config.vocab_size]
