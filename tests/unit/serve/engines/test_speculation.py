"""Proposals of the MTP layer change how many steps an answer takes, and none of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import pick
from erniekit.models.layers.mtp import NextToken
from erniekit.serve.engines.base import Done, Event, GenerationJob, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import LENGTH, alone, answers, job, make_adapter, prompts

Start = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe"))


@pytest.fixture(scope="module")
def model(moe: Found) -> torch.nn.Module:
    """Its MTP layer has learnt some of what the model says: proposals hold for some requests and fail for others."""
    made = moe.build()
    return taught(made, [alone_ids(made, p) for p in prompts(4)])


def alone_ids(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    return torch.tensor([[*prompt, *alone(model, prompt, 16)]])


def taught(model: torch.nn.Module, texts: list[torch.Tensor], steps: int = 40) -> torch.nn.Module:
    """The rest of the model stays as it is: its answers do."""
    model.requires_grad_(False)
    layer: NextToken = model.mtp[0]
    optimiser = torch.optim.Adam(layer.requires_grad_(True).parameters(), lr=3e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for ids in texts:
            context = model.context(torch.arange(ids.shape[1] - 2)[None])
            with torch.no_grad():
                hidden = model.run_layers(model.embed_ids(ids[:, :-2]), context)
            states = model.norm(layer(model.embed_ids(ids[:, 1:-1]), hidden, context))
            logits = model.output.logits(states, model.head_weight(), None)
            loss = loss + torch.nn.functional.cross_entropy(logits[0], ids[0, 2:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.requires_grad_(False).eval()


@pytest.fixture(params=["plain", "recorded"])
def start(request, model: torch.nn.Module) -> Iterator[Start]:
    """Starts an engine on this model, by default with proposals of three tokens."""
    engines: list[EmbeddedEngine] = []

    def started(proposals: int = 3, models: dict | None = None, blocks: int = 64, **limits: int) -> EmbeddedEngine:
        cache = PagedCache(model.config, blocks, 4, torch.float32, "cpu", mtp=proposals > 0)
        asked = EngineLimits(**{"sequences": 5, "tokens": 16, "length": LENGTH, "proposals": proposals, **limits})
        device = pick("cpu", False) if request.param == "recorded" else None
        engines.append(EmbeddedEngine(models or {"m": model}, cache, asked, device))
        return engines[-1]

    yield started
    for engine in engines:
        engine.stop()


def test_greedy_answers_are_those_without_proposals_and_take_fewer_steps(model, start: Start):
    engine, asked = start(), prompts(8)
    expected = [alone(model_alone(model), p) for p in asked]
    assert answers(engine, [job(p) for p in asked]) == expected
    load = engine.load()
    assert 0 < load.proposals_held < load.proposed, "proposals should hold for some and fail for others"
    assert load.cache_used == 0
    before = load.steps
    assert answers(engine, [job(asked[0])])[0] == expected[0], "a shared prefix"
    few = engine.load().steps - before
    plain = start(proposals=0, burst=1)
    answers(plain, [job(asked[0])])
    assert few < plain.load().steps


def model_alone(model: torch.nn.Module) -> torch.nn.Module:
    """A copy that no engine has given a cache."""
    made = type(model)(model.config)
    made.load_state_dict(model.state_dict())
    return made.eval()
