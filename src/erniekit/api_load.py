"""`erniekit.load`: any model folder on this disk -> (model, tokenizer). Used by api/, serve/ and recipes/.

A folder may be a base model, an adapter, a merged export, a checkpoint-N or the output_dir of a run; HF or Paddle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from erniekit.checkpoint.hub import resolve_model
from erniekit.checkpoint.manifest import Verify
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.published import check_answer, check_published
from erniekit.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export.source import find_source
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import emit
from erniekit.lora.adapter import attach, places
from erniekit.lora.adapter_files import is_adapter, read_adapter
from erniekit.lora.base import check_model, find_base
from erniekit.lora.frozen_base import packing
from erniekit.lora.score_head import open_base
from erniekit.weight_kinds import BF16

UNREAD_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")  # other programs' files; load_tokenizer refuses them
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def load(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    *,
    base: str | Path | None = None,
    override_base: bool = False,
) -> tuple[nn.Module, Tokenizer | None]:
    """The model in eval mode, and its tokenizer, None where the folder has no file of one. `model(input_ids)` gives
    logits [batch, length, vocab].

    dtype: as stored when not given; bf16 and fp32 work as names. base: the model an adapter sits on, when the place
    its config names is gone; another one than it was trained on is refused without override_base. Adapters stay beside
    the weights (lora.merge.fold folds them in).
    """
    found = find_model(folder, base, override_base=override_base)
    tokenizer = found.tokenizer() if found.has_tokenizer_files() else None  # broken ones fail before weights are read
    return found.build(dtype_of(dtype), device), tokenizer


@dataclass(frozen=True)
class Found:
    weights: ModelFolder
    adapter: Path | None = None
    override_base: bool = False  # the adapter may have been trained on another base

    def build(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", packed: str = BF16
    ) -> nn.Module:
        """packed: the kind of base, as frozen_base names it, that weights are kept as: those that an adapter sits on,
        as in the run that trained it, or all."""
        if kinds := sorted({f"{w.scheme.format}, {w.scheme.bits} bits" for w in self.weights.quantised.values()}):
            static = any(w.scheme.static_inputs for w in self.weights.quantised.values())
            how = "computed as an FP8 engine does" if static else "dequantised as they are read"
            emit(f"weights  quantised ({'; '.join(kinds)}), {how}")
        meta, adapter, only = self.weights.meta(), None, None
        if self.adapter is not None:
            adapter = read_adapter(self.adapter, meta, self.weights.verify)
            only = {projection.module for projection in places(meta, adapter)}
        model = self.weights.build(dtype, device, packing(self.weights, packed, device, only=only))
        if adapter is not None:
            attach(model, adapter)
        model.eval()
        self.check(model)
        return model

    def check(self, model: nn.Module) -> None:
        """Raises where base + adapter in memory do not give the logits of the adapter's run; of a whole model, where
        they differ and so do its files."""
        if self.adapter is None and not self.weights.compared:
            check_answer(self.weights.path, model, self.weights.verify)
        if self.adapter is not None and not self.override_base:
            check_model(self.adapter, self.weights.path, model)

    @property
    def trained(self) -> Path:
        """The folder that a training wrote."""
        return self.adapter or self.weights.path

    def has_tokenizer_files(self) -> bool:
        """Whether the folder has any file of one: a link to nowhere and settings without a vocabulary count, too."""
        folder = self._tokenizer_folder()
        return any(os.path.lexists(folder / name) for name in (*TOKENIZER_FILES, *UNREAD_VOCABULARIES))

    def tokenizer(self, other: str | Path | None = None) -> Tokenizer:
        """other: a folder whose tokenizer is to be used instead (the key tokenizer_name)."""
        folder = self._tokenizer_folder() if other is None else Path(other).expanduser()
        if other is None and not self.has_tokenizer_files():
            raise CheckpointError(
                f"{folder} holds a model without a tokenizer",
                where=str(folder),
                fix="copy tokenizer.model or tokenizer.json next to its config.json, or name a folder with one: "
                "tokenizer_name=DIR",
            )
        return load_tokenizer(folder, self.weights.config.vocab_size)

    def describe(self) -> str:
        return f"{self.adapter} on {self.weights.path}" if self.adapter else str(self.weights.path)

    def _tokenizer_folder(self) -> Path:
        """An adapter's own tokenizer where it changed one; a mere copy is read from the base's folder."""
        base, own = self.weights.path, self.adapter
        if own is None or not has_tokenizer(own):
            return base
        names = [name for name in TOKENIZER_FILES if (own / name).is_file()]
        return base if all(_same(own / name, base / name) for name in names) else own


def find_model(
    folder: str | Path,
    base: str | Path | None = None,
    hub: str | None = None,
    override_base: bool = False,
    verify: str = "auto",
    base_verify: str | None = None,
) -> Found:
    """What a folder (or hub id) holds; an output_dir without a final model gives its newest whole checkpoint. verify:
    the key of that name; base_verify: of the model below an adapter, where it differs."""
    mode = cast(Verify, verify)
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(
            f"no model is named by {folder!r:.60}, of type {type(folder).__name__}",
            where="load",
            fix="give the path of its folder",
        )
    path = Path(folder).expanduser()
    source = find_source(path) if path.is_dir() else None
    if source is None:
        if path.is_dir() and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{folder} holds neither a model, an adapter nor a checkpoint-N",
                where=str(path),
                fix="point at a folder with config.json and .safetensors, or with adapter_config.json",
            )
        path = resolve_model(str(folder), hub)
        if not is_adapter(path):
            return Found(ModelFolder(path, verify=mode, probed=True))
    elif not source.is_adapter:
        return Found(ModelFolder(source.path, verify=mode, probed=True))
    else:
        path = source.path
    check_published(path, mode)
    return Found(open_base(find_base(path, base, hub), path, cast(Verify, base_verify or mode)), path, override_base)


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(given, str):
        return given
    if given not in DTYPES:
        raise ConfigError(f"dtype {given!r} is not known", where="dtype", fix="one of: " + ", ".join(DTYPES))
    return DTYPES[given]
