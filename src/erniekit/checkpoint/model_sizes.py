"""A config.json against the weight files in its folder, by their headers only: before anything is built or allocated.

Called when a model folder is opened. Counts come first: layers and experts decide how many names and modules there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.models.config import DecoderConfig
from erniekit.printable import counted

_LAYER = re.compile(r"\w+\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r".*\.mlp\.experts\.(\d{1,9})\.")
_FUSED = ".mlp.experts.down_proj"
_EMBEDDING = "embed_tokens.weight"


def check_sizes(
    c: DecoderConfig, names: Collection[str], shape_of: Callable[[str], tuple[int, ...]], config_json: Path
) -> None:
    """Raises where the files name other numbers of layers or experts, or another vocabulary or width. names: of the
    tensors in them."""
    layers = _count(_LAYER, names)
    if layers and layers != c.num_layers:
        raise _differ(config_json, "num_hidden_layers", c.num_layers, f"hold {counted(layers, 'layer')}")
    if c.moe is not None:
        fused = next((name for name in names if name.endswith(_FUSED)), None)
        shape = shape_of(fused) if fused else ()
        experts = shape[0] if shape else _count(_EXPERT, names)
        expected = c.moe.experts + (0 if c.moe.vision is None or fused else c.moe.vision.experts)
        if experts and experts != expected:
            raise _differ(config_json, "moe_num_experts", expected, f"hold {counted(experts, 'expert')}")
    embedding = next((name for name in names if name.endswith("." + _EMBEDDING)), None)
    if embedding is None:
        return
    shape = shape_of(embedding)
    if len(shape) != 2 or shape[0] != c.vocab_size:
        raise _differ(config_json, "vocab_size", c.vocab_size, f"have an embedding of {list(shape)}")
    if shape[1] != c.hidden_size:
        raise _differ(config_json, "hidden_size", c.hidden_size, f"have an embedding of {list(shape)}")


def _count(pattern: re.Pattern[str], names: Collection[str]) -> int:
    found = (pattern.match(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _differ(config_json: Path, key: str, value: int, files: str) -> CheckpointError:
    return CheckpointError(
        f"config.json says {key} {value}, the weight files {files}",
        where=f"{config_json}, key {key}",
        fix="config.json and the weights are of different models: download both again",
    )
