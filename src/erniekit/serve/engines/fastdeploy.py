"""How FastDeploy is started: the flags ERNIEKit passed it."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.serve.engines.engine_program import EngineProgram, Target


def arguments(target: Target, folder: Path) -> list[str]:
    keys = target.keys
    out = [
        "--model", str(target.model), "--served-model-name", target.name,
        "--tensor-parallel-size", str(keys["server_tp_degree"]),
        "--host", target.host, "--port", str(target.port),
        "--metrics-port", str(keys["metrics_port"]),
        "--engine-worker-queue-port", str(keys["engine_worker_queue_port"]),
        "--use-warmup", str(keys["use_warmup"]),
        "--max-model-len", str(target.longest), "--max-num-seqs", str(keys["max_num_seqs"]),
        "--gpu-memory-utilization", str(keys["gpu_memory_utilization"]),
        "--block-size", str(keys["block_size"]), "--kv-cache-ratio", str(keys["kv_cache_ratio"]),
    ]  # fmt: skip
    if keys["quantization"]:
        out += ["--quantization", keys["quantization"]]
    if keys["load_choices"]:
        out += ["--load-choices", keys["load_choices"]]
    if keys["enable_mm"]:
        out += ["--enable-mm", "--enable-chunked-prefill"]
        out += ["--max-num-batched-tokens", str(keys["max_num_batched_tokens"])]
        if keys["limit_mm_per_prompt"]:
            out += ["--limit-mm-per-prompt", json.dumps(dict(keys["limit_mm_per_prompt"]))]
        if keys["reasoning_parser"]:
            out += ["--reasoning-parser", keys["reasoning_parser"]]
    else:
        # The default names the parser of the vision models: for text it must be set.
        out += target.pass_on(reasoning_parser="--reasoning-parser")
    return out + target.pass_on(tool_call_parser="--tool-call-parser")


def environment(target: Target) -> dict[str, str]:
    return {"FD_API_KEY": target.secret} if target.secret else {}


PROGRAM = EngineProgram(
    "fastdeploy",
    "fastdeploy",
    "fastdeploy.entrypoints.openai.api_server",
    "pip install fastdeploy-gpu",
    arguments,
    environment,
    adapters=False,
)
