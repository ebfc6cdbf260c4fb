"""What tests ask of an embedded engine, and what a model says without one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import torch

from erniekit.api_load import Found
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.devices import pick
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.settings import LoRASettings
from erniekit.serve.engines.base import GenerationJob, SamplingParams, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache

LENGTH = 64


def engine_of(models: dict[str, torch.nn.Module], blocks: int = 64, size: int = 4, **limits: int) -> EmbeddedEngine:
    """With recorded steps, which a CPU launches."""
    cache = PagedCache(next(iter(models.values())).config, blocks, size, torch.float32, "cpu")
    asked = EngineLimits(**{"sequences": 5, "tokens": 16, "length": LENGTH, **limits})
    return EmbeddedEngine(models, cache, asked, pick("cpu", False))


def job(prompt, model="m", stop=(), **wishes) -> GenerationJob:
    return GenerationJob(
        tuple(prompt), model, SamplingParams(**{"max_tokens": 12, "temperature": 0, **wishes}), frozenset(stop), 1280
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 1000) for _ in range(rng.randrange(1, 45))] for _ in range(count)]


async def listen(engine: EmbeddedEngine, *jobs: GenerationJob) -> list[list[int]]:
    generated: list[list[int]] = [[] for _ in jobs]
    async for number, event in engine.submit(*jobs):
        if isinstance(event, Token):
            generated[number].append(event.id)
        else:
            assert event.reason in ("stop", "length"), event
    return generated


def answers(engine: EmbeddedEngine, jobs: list[GenerationJob], together: bool = True) -> list[list[int]]:
    async def go() -> list[list[int]]:
        if together:
            return [generated for (generated,) in await asyncio.gather(*(listen(engine, one) for one in jobs))]
        return [(await listen(engine, one))[0] for one in jobs]

    return asyncio.run(asyncio.wait_for(go(), 120))


@torch.no_grad()
def alone(model: torch.nn.Module, prompt: list[int], count: int = 12) -> list[int]:
    """Greedy with no cache at all: the whole text through the model for every token."""
    ids = list(prompt)
    while len(ids) < min(len(prompt) + count, LENGTH):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def inject_drawn(model: torch.nn.Module, settings: LoRASettings, seed: int, std: float = 0.3) -> None:
    """Adapters whose B is drawn, not zero: they change what the model says."""
    inject(model, settings, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in lora_state(model).items():
            if name.endswith(".B"):
                value.normal_(std=std)


def make_adapter(weights: ModelFolder, folder: Path, seed: int, settings: LoRASettings | None = None) -> Path:
    """Adapters on every projection, large enough to change what is said."""
    settings = settings or LoRASettings(4, 8.0)
    model = weights.build()
    inject_drawn(model, settings, seed)
    write_adapter(folder, adapter_of(model, settings, base=str(weights.path)), model)
    return folder


def says_the_same_in_a_small_cache(engine: EmbeddedEngine, small: Found) -> None:
    """Of 18 blocks or so; the engine is stopped."""
    asked = prompts(10, seed=2)
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(small.build(), p) for p in asked]
        assert engine.load().evicted > 0, "there was room for all"
        assert engine.load().cache_used == 0
    finally:
        engine.stop()
