"""How vLLM is started."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.extras import install_command
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


def environment(target: Target) -> dict[str, str]:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return quiet | ({"VLLM_API_KEY": target.secret} if target.secret else {})


PROGRAM = EngineProgram(
    "vllm", "vllm", "vllm.entrypoints.openai.api_server", install_command("vllm"), arguments, environment
)
