"""A config.json against the weight files in its folder, by their headers only: before anything is built or allocated.

Called when a model folder is opened. Counts come first: layers and experts decide how many names and modules there are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from erniekit.errors import CheckpointError
from erniekit.printable import counted

if TYPE_CHECKING:
    from erniekit.checkpoint.model_folder import ModelFolder

_LAYER = re.compile(r"\w+\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r".*\.mlp\.experts\.(\d{1,9})\.")
_FUSED = ".mlp.experts.down_proj"
_EMBEDDING = "embed_tokens.weight"


def check_sizes(folder: ModelFolder) -> None:
    """Raises where the files name other numbers of layers or experts, or another vocabulary or width."""
    c = folder.config
    layers = _count(_LAYER, folder)
    if layers and layers != c.num_layers:
        raise _differ(folder, "num_hidden_layers", c.num_layers, f"hold {counted(layers, 'layer')}")
    if c.moe is not None:
        fused = next((name for name in folder.files if name.endswith(_FUSED)), None)
        shape = folder.slices().shape(fused) if fused else ()
        experts = shape[0] if shape else _count(_EXPERT, folder)
        expected = c.moe.experts + (0 if c.moe.vision is None or fused else c.moe.vision.experts)
        if experts and experts != expected:
            raise _differ(folder, "moe_num_experts", expected, f"hold {counted(experts, 'expert')}")
    embedding = next((name for name in folder.files if name.endswith("." + _EMBEDDING)), None)
    if embedding is None:
        return
    shape = folder.slices().shape(embedding)
    if len(shape) != 2 or shape[0] != c.vocab_size:
        raise _differ(folder, "vocab_size", c.vocab_size, f"have an embedding of {list(shape)}")
    if shape[1] != c.hidden_size:
        raise _differ(folder, "hidden_size", c.hidden_size, f"have an embedding of {list(shape)}")


def _count(pattern: re.Pattern[str], folder: ModelFolder) -> int:
    found = (pattern.match(name) for name in folder.files)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _differ(folder: ModelFolder, key: str, value: int, files: str) -> CheckpointError:
    return CheckpointError(
        f"config.json says {key} {value}, the weight files {files}",
        where=f"{folder.path / 'config.json'}, key {key}",
        fix="config.json and the weights are of different models: download both again",
    )
