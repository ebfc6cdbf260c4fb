"""A tuned vision model, through the command line: adapters merged, the release layout with the ids servers need,
processor files untouched; what cannot be written is refused by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from erniekit.api_load import Found, find_model
from erniekit.cli.main import main
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject, lora_state
from erniekit.lora.settings import LoRASettings
from erniekit.serve.engines.base import GenerationJob, SamplingParams, Token
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.seeing import inline, picture, prompt_of, seeing_folder, user

PREPROCESSOR = '{"patch_size": 14, "merge_size": 2, "min_pixels": 3136,\n  "max_pixels": 9408, "own": [1]}'
IDS = {"im_patch_id": 10, "image_start_token_id": 11, "image_end_token_id": 12, "video_start_token_id": 13,
       "video_end_token_id": 14, "video_token_id": 17}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Its config.json does not say the ids, as those of some releases."""
    folder = seeing_folder(tmp_path / "eyes")
    config = json.loads((folder / "config.json").read_text())
    bare = {name: value for name, value in config.items() if not name.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(bare))
    (folder / "preprocessor_config.json").write_text(PREPROCESSOR)
    (folder / "processing_ernie4_5_vl.py").write_text("raise SystemExit('code of others is not run')\n")
    (folder / "notes.py").write_text("")
    return folder


def adapter_on(base: Path, folder: Path) -> Path:
    """On every default target of both banks and the resampler, large enough to change what is said."""
    model = find_model(base).weights.build()
    settings = LoRASettings(4, 8.0)
    inject(model, settings, 3)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in lora_state(model).items():
            if name.endswith(".B"):
                value.normal_(std=0.2)
    assert any("resampler" in name for name in lora_state(model))
    write_adapter(folder, adapter_of(model, settings, base=str(base)), model)
    return folder


def said(model: torch.nn.Module) -> list[int]:
    ids, vision = prompt_of(user(picture(inline("a.png")), "what?"))
    engine = EmbeddedEngine(
        {"m": model}, PagedCache(model.config, 32, 8, torch.float32, "cpu"), EngineLimits(length=96)
    )

    async def run() -> list[int]:
        job = GenerationJob(tuple(ids), "m", SamplingParams(8, temperature=0), frozenset(), 512, vision)
        return [event.id async for _, event in engine.submit(job) if isinstance(event, Token)]

    try:
        return asyncio.run(run())
    finally:
        engine.stop()


def test_a_merged_adapter_answers_pictures_as_base_and_adapter_do_in_the_layout_servers_read(base, tmp_path):
    adapter = adapter_on(base, tmp_path / "tuned")
    out = tmp_path / "merged"
    assert main(["export", str(base), f"lora_path={adapter}", f"output_dir={out}"]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["moe_num_experts"] == [8, 8]
    assert "text_config" not in config
    assert {name: config.get(name) for name in IDS} == IDS
    assert config["use_temporal_conv"] is True
    with safe_open(out / "model.safetensors", "pt") as file:
        assert any(name.startswith("vision_model.") for name in file.keys())  # noqa: SIM118
    assert (out / "preprocessor_config.json").read_text() == PREPROCESSOR
    assert (out / "processing_ernie4_5_vl.py").read_bytes() == (base / "processing_ernie4_5_vl.py").read_bytes()
    assert not (out / "notes.py").exists()
    found = find_model(base)
    beside = with_adapter(found.build(), Found(found.weights, adapter))
    assert said(find_model(out).build()) == said(beside) != said(found.build())


@pytest.mark.parametrize(
    ("words", "told"),
    [(["quantize", "{base}", "quant=w8a16", "output_dir={out}"], "a vision-language model"),
     (["export", "{base}", "format=gguf"], "erniekit writes GGUF files of")],
)  # fmt: skip
def test_formats_without_pictures_are_refused_by_name(base, tmp_path, capsys, words, told):
    assert main([word.format(base=base, out=tmp_path / "out") for word in words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "where:", "fix:"))]
    assert told in lines[0]
    assert len(lines) == 3
    assert not (tmp_path / "out").exists()
