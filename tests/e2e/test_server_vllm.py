"""vLLM itself, started by `erniekit server`, says what the embedded engine says: dense, with experts, with adapters."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx2 as httpx
import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.cli.main import main
from erniekit.demo import tiny
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.settings import LoRASettings
from erniekit.serve.engines.base import GenerationJob, SamplingParams, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import inject_drawn
from support.serving import Program
from support.vllm_cpu import ENV, environment

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("vllm")]

PROMPTS = [[5, 6, 7, 8], [100, 200, 300], list(range(50, 90))]
LENGTH = 16


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return environment()


def make_model(folder: Path, family: str, monkeypatch) -> Found:
    monkeypatch.setitem(tiny.SHAPE, "head_dim", 32)  # the smallest its CPU attention has
    if family == "ernie4_5_moe":  # further-token layers are of no use to it
        monkeypatch.setitem(tiny.FAMILIES[family], "num_nextn_predict_layers", 0)
    return find_model(tiny.make_tiny_model(folder, family=family))


def make_adapter(found: Found, folder: Path, seed: int) -> Path:
    model, settings = found.weights.build(), LoRASettings(8, 16.0)
    inject_drawn(model, settings, seed, std=0.2)
    write_adapter(folder, adapter_of(model, settings, base=str(found.weights.path)), model)
    return folder


def ours(found: Found, adapters: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What the embedded engine says, by model name."""
    base = found.build(torch.float32)
    trees = {"tiny": base} | {name: with_adapter(base, Found(found.weights, path)) for name, path in adapters.items()}
    cache = PagedCache(found.weights.config, 64, 16, torch.float32, "cpu")
    engine = EmbeddedEngine(trees, cache, EngineLimits(length=256))

    async def say(name: str, prompt: list[int]) -> list[int]:
        wish = SamplingParams(LENGTH, temperature=0, ignore_stop=True)
        stream = engine.submit(GenerationJob(tuple(prompt), name, wish, frozenset(), tiny.VOCAB))
        return [event.id async for _, event in stream if isinstance(event, Token)]

    async def all_of_it() -> dict[str, list[list[int]]]:
        return {name: [await say(name, prompt) for prompt in PROMPTS] for name in trees}

    try:
        return asyncio.run(all_of_it())
    finally:
        engine.stop()


def chat(place: str, capsys) -> str:
    """What `erniekit chat` prints of a greedy answer."""
    words = ["temperature=0", "max_new_tokens=1024", "max_model_len=256", "device=cpu", "compute_type=fp32"]
    capsys.readouterr()
    assert main(["chat", place, *words, "--prompt", "Who are you?"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ernie4_5", "ernie4_5_moe", "adapters"])
def test_it_says_what_the_embedded_engine_says(kind: str, vllm_python: str, tmp_path: Path, monkeypatch, capsys):
    found = make_model(tmp_path / "tiny", "ernie4_5" if kind == "adapters" else kind, monkeypatch)
    adapters = {}
    if kind == "adapters":
        adapters = {name: make_adapter(found, tmp_path / name, seed) for seed, name in enumerate(("style", "facts"))}
    expected = ours(found, adapters)
    words = ["engine=vllm", f"engine_python={vllm_python}", "port=0", "max_model_len=256", "compute_type=fp32"]
    words += ["gpu_memory_utilization=0.2", "engine_args=--enforce-eager"]
    if adapters:
        words.append("lora_modules=" + ",".join(f"{name}={path}" for name, path in adapters.items()))
    server = Program(tmp_path / "tiny", *words, env=ENV)
    try:
        url = server.ready(600)
        for name, answers in expected.items():
            for prompt, said in zip(PROMPTS, answers):
                body = {"model": name, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0}
                body |= {"ignore_eos": True, "return_token_ids": True}
                answer = httpx.post(url + "/v1/completions", json=body, timeout=120).json()
                assert answer["choices"][0]["token_ids"] == said, name
        if kind == "ernie4_5":  # the terminal's client, with more tokens asked for than there is room
            theirs, own = (chat(place, capsys) for place in (url, str(tmp_path / "tiny")))
            whole = own.partition("\ufffd")[0]  # compared up to the first broken character: there the texts part
            assert len(whole) > 3
            assert theirs.startswith(whole)
        assert server.end(signal.SIGTERM, 120) == 0, server.text
    finally:
        server.close()
    if adapters:
        assert len({str(answers) for answers in expected.values()}) == 3, "the adapters change nothing"
