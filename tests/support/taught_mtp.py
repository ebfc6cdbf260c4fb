"""An MTP layer that has learnt some of what its model says: proposals hold for some requests and fail for others."""

from __future__ import annotations

import torch

from erniekit.models.layers.mtp import NextToken
from support.engine_jobs import alone

SAID = 16  # tokens of each answer it learns


def taught(model: torch.nn.Module, prompts: list[list[int]], steps: int = 25) -> torch.nn.Module:
    """Its answers to these prompts. The rest of the model stays as it is, and so do its answers."""
    model.requires_grad_(False)
    texts = [torch.tensor([[*prompt, *alone(model, prompt, SAID)]]) for prompt in prompts]
    layer: NextToken = model.mtp[0]
    optimiser = torch.optim.Adam(layer.requires_grad_(True).parameters(), lr=1e-2)
    contexts = [model.context(torch.arange(ids.shape[1] - 2)[None]) for ids in texts]
    hidden = [model.run_layers(model.embed_ids(ids[:, :-2]), context) for ids, context in zip(texts, contexts)]
    for _ in range(steps):
        loss = torch.zeros(())
        for ids, context, states in zip(texts, contexts, hidden):
            ahead = model.norm(layer(model.embed_ids(ids[:, 1:-1]), states, context))[0, 1 - SAID :]
            loss = loss + torch.nn.functional.cross_entropy(model.head_logits(ahead), ids[0, 1 - SAID :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.requires_grad_(False).eval()
