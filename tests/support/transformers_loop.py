"""What transformers' own generation loop says, greedily, on a model of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from support.merged import fold
from support.transformers_bridge import to_transformers


@torch.no_grad()
def said_by_transformers(
    model: torch.nn.Module, prompt: Sequence[int], count: int, stop_ids: Sequence[int]
) -> list[int]:
    """Ids up to a stop token. Adapters are folded into the model that is given."""
    from transformers import GenerationConfig

    ends = sorted(set(stop_ids))
    twin = to_transformers(fold(model).eval(), model.config)
    ids = torch.tensor([list(prompt)])
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=0)
    said = twin.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0, len(prompt) :]
    return [id for id in said.tolist() if id not in ends]
