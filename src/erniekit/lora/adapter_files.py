"""Adapters on disk, in any known format, by the config file in the folder.

Called by recipes (lora_path, checkpoints), export, chat and the API.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import nn

from erniekit.checkpoint.manifest import Verify
from erniekit.checkpoint.published import check_published
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file
from erniekit.lora import paddle_files, peft_files
from erniekit.lora.adapter import Adapter, places


def is_adapter(folder: Path) -> bool:
    return any(has_file(folder, config) for config in (peft_files.CONFIG, paddle_files.CONFIG))


def read_adapter(folder: Path, model: nn.Module, verify: Verify = "auto") -> Adapter:
    """The adapter in `folder` for `model` (on the meta device will do); names and shapes are checked against it.
    verify: see `check_published`."""
    if folder.is_dir():
        check_published(folder, verify)
    if has_file(folder, peft_files.CONFIG):
        adapter = _read(peft_files.read_peft, folder, model)
    elif has_file(folder, paddle_files.CONFIG):
        adapter = _read(paddle_files.read_paddle, folder, model)
    else:
        raise CheckpointError(
            "no adapter here" if folder.is_dir() else "no such folder",
            where=str(folder),
            fix=f"point lora_path at the folder that holds {peft_files.CONFIG} or Paddle's {paddle_files.CONFIG}",
        )
    if not adapter.updates:
        raise CheckpointError(
            "the adapter's file holds no lora_A and lora_B", where=str(folder), fix="download or copy the adapter again"
        )
    places(model, adapter)
    return adapter


def _read(read: Callable[[Path, nn.Module], Adapter], folder: Path, model: nn.Module) -> Adapter:
    """Configs of adapters nest values of many kinds; whatever is wrong in one is the file's fault."""
    try:
        return read(folder, model)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, re.error, RuntimeError) as error:
        raise CheckpointError(
            f"the adapter's config or tensors hold what no adapter has: {type(error).__name__}: {str(error)[:200]}",
            where=str(folder),
            fix="download or copy the adapter again",
        ) from None


def write_adapter(folder: Path, adapter: Adapter, model: nn.Module, layout: str = "hf") -> list[Path]:
    """PEFT's files for `hf` and `hf_fused`, ERNIEKit's for `paddle`: exactly the same function of the base."""
    folder.mkdir(parents=True, exist_ok=True)
    write = paddle_files.write_paddle if layout == "paddle" else peft_files.write_peft
    return write(folder, adapter, model)
