"""Greedy answers to a list of prompts, from a model that is in memory already: the embedded engine, started for them
alone. Called by recipes/generation_eval.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import nn

from erniekit import heartbeat
from erniekit.devices.base import Device
from erniekit.errors import ErnieKitError
from erniekit.models.config import DecoderConfig
from erniekit.serve.engines.base import Done, GenerationJob, SamplingParams, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.loaded_models import make_cache

AT_ONCE = 8
BLOCK = 16  # positions
MEMORY = 0.9  # of what is free on the device, at most


def generate_greedily(
    model: nn.Module,
    config: DecoderConfig,
    prompts: Sequence[Sequence[int]],
    *,
    device: Device,
    dtype: torch.dtype,
    stop_ids: frozenset[int],
    vocab: int,
    max_tokens: int,
) -> list[list[int]]:
    """Ids of each answer, the stop token apart. The model's layers are given a cache and stay so: hand in one of its
    own. vocab: ids the tokenizer can spell."""
    if not prompts:
        return []
    length = min(config.max_positions, max(map(len, prompts)) + max_tokens)
    limits = EngineLimits(sequences=min(AT_ONCE, len(prompts)), length=length, queue=len(prompts))
    cache = make_cache(config, limits, BLOCK, dtype, device, MEMORY)
    sampling = SamplingParams(max_tokens, temperature=0.0)
    jobs = [GenerationJob(tuple(map(int, prompt)), "model", sampling, stop_ids, vocab) for prompt in prompts]
    engine = EmbeddedEngine({"model": model}, cache, limits)
    try:
        return asyncio.run(_answers(engine, jobs))
    finally:
        engine.stop("done")


async def _answers(engine: EmbeddedEngine, jobs: Sequence[GenerationJob]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in jobs]
    async for number, event in engine.submit(*jobs):
        heartbeat.beat()
        if isinstance(event, Token):
            out[number].append(event.id)
        elif isinstance(event, Done) and event.reason == "error":
            raise ErnieKitError(f"an answer could not be generated: {event.message}", where="eval_generate")
    return out
