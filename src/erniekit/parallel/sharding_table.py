"""A whole model's sharding and its weights' names there. Called by apply.py, recipes/ and the planner's callers.

Apart from apply.py, which imports all that spreads a model: a plan needs the table alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model_contract import front_prefixes, parts_of, spread
from erniekit.parallel.layout import Layout
from erniekit.parallel.plan import Plan
from erniekit.parallel.sharding import Heads, Sharding

if TYPE_CHECKING:
    from torch import nn


def plain(name: str) -> str:
    """A weight's name without the adapter around it: what weight tables and shardings call it."""
    return name.replace(".base.", ".")


def sharding_of(model: nn.Module, plan: Plan, layout: Layout) -> Sharding:
    """From the whole model on the meta device, adapters in it: every tensor's shape, and what fused rows are called.
    plan: of the decoder; its towers bring their own."""
    config = spread(model).config
    part_rows = {}
    for name, module in model.named_modules():
        if (parts := parts_of(module)) is not None:
            part_rows[name] = parts
    sharding = Sharding(
        {plain(name): tuple(param.shape) for name, param in model.named_parameters()},
        {rule: cut for tower in spread(model).towers().values() for rule, cut in tower.plan.items()} | plan,
        Heads(config.num_heads, config.num_kv_heads, config.head_dim),
        layout,
        config.num_layers,
        config.tie_word_embeddings and not config.labels,  # a score head is never the embedding
        part_rows,
        front_prefixes(model),
    )
    sharding.mtp_trained = bool(spread(model).mtp_weight)
    return sharding
