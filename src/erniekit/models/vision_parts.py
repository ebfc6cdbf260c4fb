"""The parts of a vision-language model, by the names of their weights: which a run leaves as they are, and the tower's
learning rates layer by layer. Called by recipes/.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import nn

FREEZE_VISION, FREEZE_LM, FREEZE_RESAMPLER = "freeze_vision", "freeze_lm", "freeze_resampler"  # of freeze_config


def part_of(name: str) -> str:
    """tower, resampler, vision (the router and experts of vision tokens) or text: all else. ERNIEKit's cut."""
    parts = name.split(".")
    if parts[0] in ("tower", "resampler"):
        return parts[0]
    return "vision" if ".mlp.vision." in f".{name}" else "text"


def freeze(model: nn.Module, values: Collection[str]) -> None:
    """Weights of the parts that these values of freeze_config name are not trained; all others stay as they were."""
    parts = {FREEZE_VISION: "tower", FREEZE_LM: "text", FREEZE_RESAMPLER: "resampler"}
    frozen = {parts[value] for value in values}
    for name, param in model.named_parameters():
        if part_of(name) in frozen:
            param.requires_grad_(False)


def tower_lr_scale(name: str, depth: int, ratio: float | None) -> float:
    """What a weight's learning rate is multiplied by: ratio^(depth - 1 - block) in the tower, its patches as block 0,
    its last norm and everything outside of it 1."""
    if ratio is None or part_of(name) != "tower" or name.startswith("tower.ln."):
        return 1.0
    block = re.match(r"tower\.blocks\.(\d+)\.", name)
    return float(ratio ** (depth - 1 - (int(block[1]) if block else 0)))
