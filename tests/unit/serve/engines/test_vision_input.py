"""Prompts with pictures in the embedded engine: what a plain forward pass of the whole sequence says, whoever else is
speaking and however the prompt is cut; features are computed once and kept within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.data.media.frames import FrameRules
from erniekit.data.types import More, Vision
from erniekit.data.vision.rules import VisionRules
from erniekit.serve.engines.base import GenerationJob, SamplingParams, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.vision_input import FeatureCache, PromptVision
from support.seeing import SMALL, inline, picture, prompt_of, seeing_folder, user, video

RULES = VisionRules(**SMALL, frames=FrameRules(4, 4, 8))
Prompt = tuple[list[int], PromptVision | None]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small are slower on two, many times so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    return find_model(seeing_folder(tmp_path_factory.mktemp("seeing") / "tiny"))


@pytest.fixture(scope="module")
def plain(found: Found) -> Any:
    return found.build()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    two = prompt_of(user(picture(inline("a.png")), "and", picture(inline("b.png")), "differ?"), rules=RULES)
    clip = prompt_of(user(video(inline("v.mp4", "video/mp4")), "what moves?"), rules=RULES)
    turns = prompt_of(
        user(picture(inline("b.png")), "what?"), {"role": "assistant", "content": "a bar."}, user("where?"), rules=RULES
    )
    return [two, clip, ([5, 300, 17, 40], None), turns, ([9] * 30, None)]


@pytest.fixture
def engine(found: Found) -> Iterator[EmbeddedEngine]:
    made = engine_of(found)
    yield made
    made.stop()


def engine_of(found: Found, blocks: int = 128, **limits: int) -> EmbeddedEngine:
    model = found.build()
    cache = PagedCache(model.config, blocks, 4, torch.float32, "cpu")
    return EmbeddedEngine({"m": model}, cache, EngineLimits(**{"sequences": 8, "tokens": 17, "length": 160, **limits}))


def job(prompt: Prompt, count: int = 6) -> GenerationJob:
    ids, vision = prompt
    return GenerationJob(tuple(ids), "m", SamplingParams(count, temperature=0), frozenset(), 512, vision)


async def said(engine: EmbeddedEngine, *jobs: GenerationJob) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in jobs]
    async for number, event in engine.submit(*jobs):
        if isinstance(event, Token):
            out[number].append(event.id)
        else:
            assert event.reason == "length", event.message
    return out


def greedy(model: Any, prompt: Prompt, count: int = 6) -> list[int]:
    """Each token from a forward pass over everything before it."""
    ids, vision = list(prompt[0]), prompt[1]
    for _ in range(count):
        n = len(ids)
        tokens = torch.tensor([ids])
        with torch.no_grad():
            if vision is None:
                logits = model(tokens)
            else:
                patches = torch.cat([torch.from_numpy(medium.patches) for medium in vision.media])
                grids = torch.tensor([medium.grid for medium in vision.media])
                seen = Vision(patches, grids, torch.from_numpy(vision.places))
                modality = torch.zeros(1, n, dtype=torch.uint8)
                modality[0, : len(vision.modality)] = torch.from_numpy(vision.modality)
                after = torch.arange(n - len(vision.positions)) + vision.next_position
                places = torch.cat([torch.from_numpy(vision.positions).long(), after[:, None].expand(-1, 3)])
                logits = model(tokens, places[None], more=More(vision=seen, modality=modality))
        ids.append(int(logits[0, -1, :512].argmax()))
    return ids[len(prompt[0]) :]


def test_greedy_answers_equal_forward_passes_of_the_whole_sequence_alone_and_together(plain, engine, prompts):
    assert [len(vision.media) if vision else 0 for _, vision in prompts] == [2, 1, 0, 1, 0]
    assert prompts[1][1].media[0].grid[0] > 2, "several pairs of frames"
    wanted = [greedy(plain, prompt) for prompt in prompts]
    together = asyncio.run(said(engine, *map(job, prompts)))
    alone = [asyncio.run(said(engine, job(prompt)))[0] for prompt in prompts]
    assert together == alone == wanted
    other = list(prompts[0][0]), replace(prompts[0][1], media=prompts[0][1].media[::-1])
    assert asyncio.run(said(engine, job(other))) != [wanted[0]], "pixels matter"


def test_a_picture_is_looked_at_once_whoever_shows_it(engine, prompts):
    model, looks = engine.models["m"], []
    model.tower.register_forward_hook(lambda *_: looks.append(1))
    asyncio.run(said(engine, job(prompts[0]), job(prompts[0])))
    assert len(looks) == 2, "two pictures, in two prompts"
    asyncio.run(said(engine, job(prompts[3])))
    assert len(looks) == 2, "the second picture again"
    asyncio.run(said(engine, job(prompts[1])))
    assert len(looks) == 2 + prompts[1][1].media[0].units


def test_a_medium_whose_features_are_kept_needs_no_patches(plain, engine, prompts):
    ids, vision = prompts[1]
    (first,) = asyncio.run(said(engine, job((ids, vision))))
    medium = vision.media[0]
    known = engine.features.all("m", medium.key, medium.units)
    assert len(known) == medium.units
    assert engine.features.all("other", medium.key, medium.units) == ()
    bare = replace(vision, media=(replace(medium, patches=None, known=known),))
    assert asyncio.run(said(engine, job((ids, bare)))) == [first]


def test_sequences_that_are_put_back_say_the_same(plain, found, prompts):
    """Blocks for one sequence and a little more: the others are evicted, and look again."""
    small = engine_of(found, blocks=44, feature_bytes=0)
    try:
        chosen = [prompts[0], prompts[3], prompts[1]]
        assert asyncio.run(said(small, *(job(prompt, 16) for prompt in chosen))) == [
            greedy(plain, prompt, 16) for prompt in chosen
        ]
        assert small.load().evicted > 0
        assert small.features.size == 0
    finally:
        small.stop()


def test_the_cache_of_features_stays_within_its_bytes_and_drops_the_oldest():
    cache = FeatureCache(100)
    for number in range(4):
        cache.put("m", str(number), 0, torch.zeros(10))  # 40 bytes
        cache.get("m", "0", 0)
    assert cache.size == 80
    assert [cache.get("m", str(n), 0) is not None for n in range(4)] == [True, False, False, True]
    cache.put("m", "large", 0, torch.zeros(26))
    assert cache.get("m", "large", 0) is None
    assert cache.size == 80


def test_transformers_generates_the_same_from_a_picture(found: Found, plain, engine, prompts):
    from transformers import Ernie4_5_VLMoeForConditionalGeneration

    theirs = Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(found.weights.path, dtype=torch.float32).eval()
    ids, vision = prompts[0]
    kinds = torch.from_numpy(vision.modality).int()[None]
    shown = torch.zeros_like(kinds)
    shown[0, torch.from_numpy(vision.places)] = 1
    pixels = plain.tower.normalised(torch.cat([torch.from_numpy(medium.patches) for medium in vision.media]))
    with torch.no_grad():
        out = theirs.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            mm_token_type_ids=shown,
            moe_mm_token_type_ids=kinds,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([medium.grid for medium in vision.media]),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
        )
    assert out[0, len(ids) :].tolist() == asyncio.run(said(engine, job(prompts[0])))[0]
