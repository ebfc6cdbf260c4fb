"""How SGLang is started."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.serve.engines.engine_program import DTYPES, EngineProgram, Target


def arguments(target: Target, folder: Path) -> list[str]:
    out = [
        "--model-path", str(target.model), "--served-model-name", target.name,
        "--host", target.host, "--port", str(target.port),
        "--context-length", str(target.longest), "--max-running-requests", str(target.keys["max_num_seqs"]),
        "--tp-size", str(target.keys["server_tp_degree"]), "--enable-metrics",
    ]  # fmt: skip
    out += target.pass_on(
        gpu_memory_utilization="--mem-fraction-static",
        block_size="--page-size",
        max_num_batched_tokens="--chunked-prefill-size",
        quantization="--quantization",
        reasoning_parser="--reasoning-parser",
        tool_call_parser="--tool-call-parser",
        limit_mm_per_prompt="--limit-mm-data-per-request",
        max_queue="--max-queued-requests",
    )
    if target.keys["enable_mm"]:
        out.append("--enable-multimodal")
    if target.dtype:
        out += ["--dtype", DTYPES[target.dtype]]
    if target.device == "cpu":
        out += ["--device", "cpu"]
    if target.adapters:
        out += ["--enable-lora", "--max-loras-per-batch", str(len(target.adapters) + 1)]
        out += ["--lora-paths", *(f"{name}={path}" for name, path in target.adapters.items())]
    if target.secret:
        # It takes a key from its command line, which all users of the machine can read, or from such a file.
        config = folder / "sglang.yaml"
        config.touch(mode=0o600)
        config.write_text(f"api-key: {json.dumps(target.secret)}\n", encoding="utf-8")
        out += ["--config", str(config)]
    return out


PROGRAM = EngineProgram("sglang", "sglang", "sglang.launch_server", "pip install sglang", arguments)
