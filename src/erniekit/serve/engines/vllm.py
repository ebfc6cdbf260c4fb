"""How vLLM is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from erniekit.checkpoint.release_code import missing_code
from erniekit.errors import ConfigError
from erniekit.extras import install_command
from erniekit.models.config import DecoderConfig
from erniekit.serve.engines.engine_program import DTYPES, EngineProgram, Target

PARSERS = {"ernie-45-vl": "ernie45"}  # FastDeploy's name, and vLLM's
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those it has kernels for


def arguments(target: Target, folder: Path) -> list[str]:
    out = [
        "--model", str(target.model), "--served-model-name", target.name,
        "--host", target.host, "--port", str(target.port),
        "--max-model-len", str(target.longest), "--max-num-seqs", str(target.keys["max_num_seqs"]),
        "--tensor-parallel-size", str(target.keys["server_tp_degree"]),
    ]  # fmt: skip
    out += target.pass_on(
        gpu_memory_utilization="--gpu-memory-utilization",
        block_size="--block-size",
        max_num_batched_tokens="--max-num-batched-tokens",
        quantization="--quantization",
        limit_mm_per_prompt="--limit-mm-per-prompt",
    )
    parser = target.keys["reasoning_parser"]
    if target.given("reasoning_parser") and parser:
        out += ["--reasoning-parser", PARSERS.get(parser, parser)]
    if target.keys["tool_call_parser"]:
        out += ["--enable-auto-tool-choice", "--tool-call-parser", target.keys["tool_call_parser"]]
    if target.dtype:
        out += ["--dtype", DTYPES[target.dtype]]
    if target.sampling():
        out += ["--override-generation-config", json.dumps(target.sampling())]
    if target.adapters:
        rank = next((rank for rank in RANKS if rank >= target.rank), RANKS[-1])
        out += ["--enable-lora", "--max-loras", str(len(target.adapters)), "--max-lora-rank", str(rank)]
        out += ["--lora-modules", *(f"{name}={path}" for name, path in target.adapters.items())]
    return out


def check_vision(folder: Path, config: DecoderConfig, engine_args: Sequence[str]) -> None:
    """What of a vision-language model would fail only minutes later, or not at all and be computed otherwise."""
    where = str(folder / "config.json")
    if config.raw_layout == "nested":
        raise ConfigError(
            "vllm reads a vision-language model in the layout of its releases, not in transformers'",
            where=str(folder),
            fix="erniekit export ... save_format=hf first",
        )
    if lacking := missing_code(folder):
        raise ConfigError(
            f"vllm reads a vision-language model with the Python files of its release; missing: {', '.join(lacking)}",
            where=str(folder),
            fix="export on a -PT release downloaded whole (hf download), or copy its *.py files and auto_map here",
        )
    if "--trust-remote-code" not in (word.replace("_", "-") for word in engine_args):  # it takes both spellings
        raise ConfigError(
            "vllm runs the Python files of this folder (auto_map) to read the model",
            where=where,
            fix="engine_args=--trust-remote-code, if you trust them",
        )
    if config.moe is not None and not config.moe.bias:
        raise ConfigError(
            "vllm loads no vision-language model without correction biases (moe_use_aux_free: False)",
            where=where,
            fix="engine: transformers",
        )
    if config.rope_scaling is not None:
        raise ConfigError(
            f"vllm does not scale positions of a vision-language model ({config.rope_scaling['rope_type']})",
            where=where,
            fix="engine: transformers",
        )


def environment(target: Target) -> dict[str, str]:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return quiet | ({"VLLM_API_KEY": target.secret} if target.secret else {})


PROGRAM = EngineProgram(
    "vllm", "vllm", "vllm.entrypoints.openai.api_server", install_command("vllm"), arguments, environment
)
