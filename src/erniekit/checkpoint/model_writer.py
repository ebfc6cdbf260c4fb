"""Writing a model folder: shards of bounded size, index, config and tokenizer, in the HF or the Paddle layout.

Used by recipes/ (checkpoints, final model), export/ and demo/. Memory is bounded by one shard.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from erniekit.checkpoint import assembly
from erniekit.checkpoint.assembly import ModelFiles, StoredTensors
from erniekit.checkpoint.model_folder import SIDE_FILES
from erniekit.checkpoint.shards import write_json, write_shards
from erniekit.files.listed import Listed
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig

PROCESSOR = ("*processor_config.json", "chat_template.json", "*ernie*vl*.py", "*.ttf")

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def write_model(
    folder: Path,
    config: DecoderConfig,
    get: Callable[[str], torch.Tensor],
    *,
    layout: str = "hf",
    max_shard_size: float = 5.0,
    tokenizer_from: Path | None = None,
    lasting: bool = False,
) -> list[Path]:
    """`get(our name) -> tensor` is called once a tensor, in order. max_shard_size in GB. lasting: as in write_shards.
    Returns the weight files."""
    folder.mkdir(parents=True, exist_ok=True)
    dtypes: list[torch.dtype] = []
    stored = files_of(config, layout)
    files = write_shards(folder, "model", _pieces(stored.entries, get, dtypes), max_shard_size, stored.tag, lasting)
    write_settings(folder, config, layout, dtypes[0])
    if tokenizer_from is not None:
        copy_side_files(tokenizer_from, folder, SIDE_FILES + TOKENIZER_FILES)
    write_generation_config(folder, config)
    return files


def files_of(config: DecoderConfig, layout: str) -> ModelFiles:
    layout = written_layout(config, layout)
    entries = MODELS.get(config.family).entries(config, layout)
    return ModelFiles(entries, tag="np" if layout == "paddle" else "pt", limit=assembly.LIMIT)


def write_settings(folder: Path, config: DecoderConfig, layout: str, dtype: torch.dtype) -> None:
    settings = MODELS.get(config.family).config_json(config, written_layout(config, layout), DTYPE_NAMES[dtype])
    write_json(folder / "config.json", settings)


def written_layout(config: DecoderConfig, layout: str) -> str:
    """The layout a model of this kind has under the key's value."""
    if config.moe is None and layout == "hf_fused":
        return "hf"  # no experts, nothing to fuse
    if config.vision is None and layout == "hf_transformers":
        return "hf"  # of text models transformers saves what is released
    return layout


def write_generation_config(folder: Path, config: DecoderConfig) -> None:
    """Where none was copied from the source."""
    if not (folder / "generation_config.json").exists():
        ids = {"bos_token_id": config.bos_id, "eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
        write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})


def processor_files(source: Path) -> tuple[str, ...]:
    """What other programs read pictures with, in the folder of a vision model: settings, templates, fonts, and code,
    which is copied and never run."""
    return tuple(file.name for pattern in PROCESSOR for file in Listed(source).glob(pattern) if file.is_file())


def copy_side_files(source: Path, target: Path, names: Iterable[str]) -> None:
    listed = Listed(source)
    for name in names:
        if listed.has(name) and (source / name).resolve() != (target / name).resolve():
            shutil.copyfile(source / name, target / name)


def _pieces(
    entries: Sequence[StoredTensors], get: Callable[[str], torch.Tensor], dtypes: list[torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Their tensors in order; the dtypes met are noted for config.json."""
    last, value = "", torch.empty(0)
    for entry in entries:
        if entry.ours != last:
            last, value = entry.ours, get(entry.ours)
            dtypes.append(value.dtype)
        yield from zip(entry.theirs, entry.write(value))
