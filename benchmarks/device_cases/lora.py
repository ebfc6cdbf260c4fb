"""A linear with LoRA pairs on a card."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.lora.layers import SHARED, LoRALinear, Pair, Parts
from erniekit.models.layers.linear import FusedLinear

RANK = 32
QKV = (("q_proj", 2560), ("k_proj", 512), ("v_proj", 512))


def adapted(
    width: int,
    parts: Parts,
    names: tuple[str, ...] | None = None,
    scales: tuple[float, ...] = (2.0,),
    bias: bool = False,
    kind: type[LoRALinear] = LoRALinear,
) -> LoRALinear:
    """bf16, the base frozen; names: of the pairs, None for one on each part."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = FusedLinear(width, parts, bias).to(torch.bfloat16).requires_grad_(False)
    groups = {SHARED: parts} if names == (SHARED,) else {p: ((p, n),) for p, n in parts if not names or p in names}
    pairs = {}
    for i, (name, group) in enumerate(groups.items()):
        pairs[name] = Pair(group, RANK, scales[i % len(scales)], base.weight)
        nn.init.normal_(pairs[name].A, std=width**-0.5)
        nn.init.normal_(pairs[name].B, std=RANK**-0.5)
    return kind(base, parts, pairs)
