"""What the keys of an export select: base, adapters, tokenizer and destination, settled or refused before any work.

Used by run.py; `starts_training` by chat, server and eval as well, which read the same recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from erniekit.checkpoint.hub import looks_like_id, resolve_model
from erniekit.checkpoint.model_folder import read_json
from erniekit.config import RunConfig
from erniekit.data.tokenizer import has_tokenizer
from erniekit.errors import CheckpointError
from erniekit.export.source import find_source
from erniekit.files.listed import has_file
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import emit, emit_once, warn_once
from erniekit.lora.base import find_base
from erniekit.weight_kinds import BF16

RUN_FILE = "run.json"


@dataclass(frozen=True)
class ExportPlan:
    base: Path
    adapters: tuple[Path, ...]  # none: the base is written again
    tokenizer: Path | None  # named by key; else what was trained with
    out: Path


# All that export and split read. `lora` and `fine_tuning` only repeat what the folder shows.
READ = frozenset({
    "model_name_or_path", "download_hub", "output_dir", "lora_path", "override_base", "lora", "fine_tuning",
    "save_format", "max_shard_size", "copy_tokenizer", "tokenizer_name", "merge_grid", "format", "gguf_type", "quant",
})  # fmt: skip


def note_unread(cfg: RunConfig) -> None:
    """A recipe holds keys of every command; a key that was typed for this one and changes nothing is worth a line."""
    if idle := cfg.typed_besides(READ):
        emit(f"note     without effect on {cfg.command}: {', '.join(idle)} (weights keep their dtype)")


def plan_of(cfg: RunConfig) -> ExportPlan:
    """lora_path on model_name_or_path, to output_dir; or what a run left in output_dir, to <output_dir>/export."""
    output_dir = Path(str(cfg.train.output_dir)).expanduser()
    if cfg.lora.lora_path and not starts_training(cfg):
        adapters = tuple(adapter_in(path, cfg.model.download_hub) for path in cfg.lora.lora_path)
        out = destination(output_dir, _folder_of(cfg))
    else:
        source = find_source(output_dir)
        if source is None:
            raise CheckpointError(
                "neither an adapter nor a model in this folder or in a checkpoint-N inside it",
                where=f"output_dir: {output_dir}",
                fix="set output_dir to the folder a training run wrote to; "
                "adapters and their base from elsewhere: BASE lora_path=ADAPTER output_dir=DEST",
            )
        out = output_dir / _folder_of(cfg)
        if not source.is_adapter:
            if cfg.typed("model_name_or_path"):
                # Several steps of one export ask for the plan.
                emit_once(f"note     model_name_or_path is not used: {source.path} holds a whole model, not an adapter")
            if cfg.typed("lora") and cfg.lora.lora:
                warn_once(f"lora is True, but {source.path} holds a whole model, no adapter: nothing is merged")
            return ExportPlan(source.path, (), named_tokenizer(cfg), out)
        adapters = (source.path,)
    return ExportPlan(_base(cfg, adapters), adapters, named_tokenizer(cfg), out)


def starts_training(cfg: RunConfig) -> bool:
    """Whether the recipe's lora_path is what the run in output_dir began with: then that run's result is exported."""
    if cfg.typed("lora_path") or not cfg.given("output_dir") or not cfg.train.output_dir:
        return False
    output_dir = Path(cfg.train.output_dir).expanduser()
    if not (output_dir / RUN_FILE).is_file() or find_source(output_dir) is None:
        return False
    recorded = read_json(output_dir / RUN_FILE).get("config")
    rows = [row for row in recorded if isinstance(row, dict)] if isinstance(recorded, list) else []
    began = next((row.get("value") for row in rows if row.get("key") == "lora_path"), None)
    began = [began] if isinstance(began, str) else list(began or ())
    if began != list(cfg.lora.lora_path):
        return False
    emit_once(f"note     lora_path: the run in {output_dir} started from it; its result is used")
    return True


def adapter_in(name: str, hub: str | None = None) -> Path:
    """The adapter of a lora_path: the folder itself, the newest whole checkpoint of a run, or a cached hub id."""
    folder, fix = Path(name).expanduser(), "give the folder that holds adapter_config.json or Paddle's lora_config.json"
    if not folder.is_dir():
        try:
            folder = resolve_model(name, hub)
        except CheckpointError as error:
            more = f"; {error.fix}" if looks_like_id(name) else ""
            raise CheckpointError(f"there is no adapter {name}", where="lora_path", fix=f"{fix}{more}") from None
    source = find_source(folder)
    if source is None or not source.is_adapter:
        what = "a whole model, no adapter" if source else "no adapter"
        raise CheckpointError(f"{name} holds {what}", where="lora_path", fix=f"{fix}, or the run around it")
    return source.path


def _folder_of(cfg: RunConfig) -> str:
    """What the result in a run's folder is called. GGUF files of several types lie side by side."""
    if cfg.export.format == "gguf":
        return f"gguf-{cfg.export.gguf_type}"
    grid = cfg.export.merge_grid
    # Another result than the exact merge, and than `export-fp8` of a run in fp8.
    return "export" if grid == BF16 else f"export-{grid.replace('/', '-')}-grid"


def destination(output_dir: Path, folder: str = "export") -> Path:
    """Where base + lora_path goes: output_dir itself, or `folder` in it where it is a run's folder."""
    source = find_source(output_dir) if output_dir.is_dir() else None
    is_run = (output_dir / RUN_FILE).is_file() or (source and (source.is_adapter or source.path != output_dir))
    return output_dir / folder if is_run else output_dir


def _base(cfg: RunConfig, adapters: Sequence[Path]) -> Path:
    """model_name_or_path, else the base all of the adapters name."""
    found = {adapter: find_base(adapter, cfg.model.model_name_or_path, cfg.model.download_hub) for adapter in adapters}
    first, *others = found.values()
    if any(other.resolve() != first.resolve() for other in others):
        pairs = ", ".join(f"{adapter} on {base}" for adapter, base in found.items())
        raise CheckpointError(
            f"the adapters name different base models: {pairs}",
            where="lora_path",
            fix="name the one to merge them into: model_name_or_path=DIR",
        )
    return first


def named_tokenizer(cfg: RunConfig) -> Path | None:
    if not cfg.model.tokenizer_name:
        return None
    folder = Path(cfg.model.tokenizer_name).expanduser()
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} holds no tokenizer", where="tokenizer_name", fix="name the folder with tokenizer.json or .model"
        )
    return folder


def tokenizer_of(base: Path, adapters: Sequence[Path]) -> Path:
    """The folder whose tokenizer and chat template belong to base + adapters: what they were trained with."""
    own = [adapter for adapter in adapters if has_tokenizer(adapter)]
    if not own:
        return base
    other = next((adapter for adapter in own[1:] if not same_tokenizer(own[0], adapter)), None)
    if other is not None:
        raise CheckpointError(
            f"the adapters were trained with different tokenizers or chat templates: {own[0]} and {other}",
            where="lora_path",
            fix="name the folder whose tokenizer the result gets: tokenizer_name=DIR",
        )
    return own[0]


def same_tokenizer(one: Path, other: Path) -> bool:
    return all(_content(one, name) == _content(other, name) for name in TOKENIZER_FILES)


def _content(folder: Path, name: str) -> bytes | None:
    return (folder / name).read_bytes() if has_file(folder, name) else None
