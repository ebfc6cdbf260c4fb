"""Generation, and the server that is to come. Read by `erniekit chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_SERVER = "server"


@dataclass(frozen=True)
class ServeSection:
    max_new_tokens: int = key(1024, "Longest answer.", low=1, basic=True)
    min_tokens: int = key(0, "Shortest answer.", low=0)
    temperature: float = key(0.95, "Randomness; 0 always takes the likeliest token.", low=0, high=2, basic=True)
    top_p: float = key(0.7, "Sample from the likeliest tokens that make up this share.", low=0, high=1, basic=True)
    frequency_penalty: float = key(0.0, "Against words already said often.", low=-2, high=2)
    presence_penalty: float = key(0.0, "Against words already said.", low=-2, high=2)
    repetition_penalty: float = key(1.0, "Divides the score of words already said.", low=0)
    stream: bool = key(True, "Show the answer as it comes.")
    enable_thinking: bool = key(False, "Let a thinking model think first.")
    max_model_len: int = key(2048, "Longest prompt and answer together.", low=1, basic=True)
    stream_options: Mapping[str, Any] | None = key(None, "Of the OpenAI interface.", later=_SERVER)
    host: str = key("127.0.0.1", "Address to listen on.", later=_SERVER)
    port: int = key(8188, "Port to listen on.", low=0, high=65535, later=_SERVER)
    metrics_port: int = key(8001, "Port of the metrics.", low=0, high=65535, later=_SERVER)
    engine_worker_queue_port: int = key(8002, "Port of the engine's queue.", low=0, high=65535, later=_SERVER)
    server_tp_degree: int = key(1, "Devices one model is spread over; tensor_parallel_degree.", later=_SERVER)
    max_num_seqs: int = key(8, "Requests at once.", low=1, later=_SERVER)
    max_num_batched_tokens: int = key(384, "Tokens per engine step.", low=1, later=_SERVER)
    gpu_memory_utilization: float = key(0.9, "Share of GPU memory to use.", low=0, high=1, later=_SERVER)
    block_size: int = key(64, "Tokens per cache block.", low=1, later=_SERVER)
    kv_cache_ratio: float = key(0.75, "Share of the cache for prompts.", low=0, high=1, later=_SERVER)
    use_warmup: int = key(0, "Warm up before the first request.", later=_SERVER)
    quantization: str | None = key(None, "Weights on the server: wint4 or wint8.", later=_SERVER)
    load_choices: str | None = key(None, "Weight loader of the engine.", later=_SERVER)
    tool_call_parser: str | None = key(None, "Reads tool calls from answers.", later=_SERVER)
    reasoning_parser: str | None = key("ernie-45-vl", "Reads thoughts from answers.", later=_SERVER)
    enable_mm: bool = key(False, "Take images and video.", later=_SERVER)
    limit_mm_per_prompt: Mapping[str, Any] | None = key(None, "Most images and videos per prompt.", later=_SERVER)
