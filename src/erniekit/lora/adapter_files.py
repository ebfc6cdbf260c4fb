"""Adapters on disk, whoever wrote them: which kind a folder holds is found out by its config file.

Called by recipes (lora_path, checkpoints), export, chat and the API.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from erniekit.errors import CheckpointError
from erniekit.lora import paddle_files, peft_files
from erniekit.lora.adapter import Adapter, places


def is_adapter(folder: Path) -> bool:
    return any((folder / config).is_file() for config in (peft_files.CONFIG, paddle_files.CONFIG))


def read_adapter(folder: Path, model: nn.Module) -> Adapter:
    """The adapter in `folder` for `model` (on the meta device will do); names and shapes are checked against it."""
    if (folder / peft_files.CONFIG).is_file():
        adapter = peft_files.read_peft(folder, model)
    elif (folder / paddle_files.CONFIG).is_file():
        adapter = paddle_files.read_paddle(folder, model)
    else:
        raise CheckpointError(
            "no adapter here" if folder.is_dir() else "no such folder",
            where=str(folder),
            fix=f"point lora_path at the folder that holds {peft_files.CONFIG} or Paddle's {paddle_files.CONFIG}",
        )
    places(model, adapter)
    return adapter


def write_adapter(folder: Path, adapter: Adapter, model: nn.Module, layout: str = "hf") -> list[Path]:
    """PEFT's files for `hf` and `hf_fused`, ERNIEKit's for `paddle`: exactly the same function of the base."""
    folder.mkdir(parents=True, exist_ok=True)
    write = paddle_files.write_paddle if layout == "paddle" else peft_files.write_peft
    return write(folder, adapter, model)
