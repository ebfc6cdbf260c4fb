"""A model's layers over the tokens of a step as one flat list, keys and values in the pool: few launches, fixed shapes.

Used by recorded.py. It computes what the model's own modules compute (`run_layers` with plain_step.py's attention is
the definition), with the sum of a residual and its norm in one launch, and turning and storing in another.
T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from erniekit.kernels.add_norm import add_norm
from erniekit.kernels.paged_attention import PagedTokens, Tiles, TurnAngles, attend, store_turned
from erniekit.kernels.rope import cos_sin, inverse_frequencies
from erniekit.models.layers.attention import Attention, Context
from erniekit.models.layers.decoder import Decoder, DecoderLayer
from erniekit.models.layers.norm import RMSNorm
from erniekit.serve.engines.paged import PagedCache

# Experts and their routers take a batch's context; nothing in it matters to text that is not trained on.
_NO_CONTEXT: Any = Context(None, None, None, None)  # type: ignore[arg-type]


def why_not(model: Any) -> str | None:
    """Why these functions do not compute what a model computes; None: they do. A family may have blocks of its own, and
    here only a block's linears and feed-forward are called."""
    if type(model).run_layers is not Decoder.run_layers:
        return f"{type(model).__name__} runs its layers in its own way"
    blocks = [*model.layers, *(ahead.block for ahead in model.mtp)]
    norms = [model.norm, *(norm for block in blocks for norm in (block.attn_norm, block.mlp_norm))]
    wanted = [(DecoderLayer, blocks), (Attention, [block.attn for block in blocks]), (RMSNorm, norms)]
    others = [type(part).__name__ for kind, parts in wanted for part in parts if type(part) is not kind]
    return f"its {others[0]} is not one that recorded steps compute" if others else None


def angles(config: Any, places: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin fp32 [places, D / 2] of all places. Where a model has three axes, text has the same place on each."""
    freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, device)
    cos, sin = cos_sin(torch.arange(places, device=device)[None], freq)
    return cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()


def run_flat(
    model: Any, x_TH: torch.Tensor, where: PagedTokens, turns: TurnAngles, cache: PagedCache, tiles: Tiles | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual and what the last block adds to it: their sum is what the model's norm takes."""
    added: torch.Tensor | None = None
    for number, layer in enumerate(model.layers):
        x_TH, added = _run_layer(layer, x_TH, added, where, turns, cache, number, tiles)
    assert added is not None
    return x_TH, added


def run_mtp(
    model: Any,
    ids: torch.Tensor,
    hidden_TH: torch.Tensor,
    where: PagedTokens,
    turns: TurnAngles,
    cache: PagedCache,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first MTP layer (models/layers/mtp.py), as `run_flat`. ids [T]: the token behind each place; hidden: the
    trunk's state there, before its norm."""
    ahead = model.mtp[0]
    joined = torch.cat((ahead.emb_norm(model.embed_ids(ids)), ahead.hidden_norm(hidden_TH)), dim=-1)
    return _run_layer(ahead.block, ahead.proj(joined), None, where, turns, cache, cache.mtp_layer, tiles)


def _run_layer(
    layer: Any,
    x_TH: torch.Tensor,
    added: torch.Tensor | None,
    where: PagedTokens,
    turns: TurnAngles,
    cache: PagedCache,
    number: int,
    tiles: Tiles | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = cache.keys[number], cache.values[number]
    x_TH, h_TH = add_norm(x_TH, added, layer.attn_norm.weight, layer.attn_norm.eps)
    q = store_turned(layer.attn.qkv(h_TH), where, turns, keys, values)
    added = layer.attn.out(attend(q, keys, values, where, tiles).flatten(1))
    x_TH, h_TH = add_norm(x_TH, added, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x_TH, layer.mlp(h_TH[None], _NO_CONTEXT)[0] if layer.sparse else layer.mlp(h_TH)


def logits_of(model: Any, x_TH: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    _, normed = add_norm(x_TH, added, model.norm.weight, model.norm.eps)
    logits: torch.Tensor = model.head_logits(normed)
    return logits
