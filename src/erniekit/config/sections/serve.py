"""Generation and serving. Read by `erniekit chat` and `erniekit server`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

WHOLE = 2**31 - 1


@dataclass(frozen=True)
class ServeSection:
    max_new_tokens: int = key(1024, "Maximum tokens of an answer.", low=1, high=WHOLE, basic=True)
    min_tokens: int = key(0, "Minimum tokens of an answer.", low=0, high=WHOLE)
    temperature: float = key(0.95, "Sampling temperature; 0 = greedy.", low=0, high=2, basic=True)
    top_p: float = key(0.7, "Nucleus sampling: total probability of the candidates.", low=0, high=1, basic=True)
    top_k: int = key(0, "Sample from this many most likely tokens; 0 = no limit.", low=0, high=WHOLE)
    frequency_penalty: float = key(0.0, "Penalty on tokens by how often they occurred.", low=-2, high=2)
    presence_penalty: float = key(0.0, "Penalty on tokens that occurred.", low=-2, high=2)
    repetition_penalty: float = key(1.0, "Divides the logits of tokens that occurred.", low=0.01, high=10)
    stream: bool = key(True, "Print the answer while it is generated.")
    enable_thinking: bool = key(False, "Let a reasoning model reason first.")
    max_model_len: int | None = key(
        None,
        "Maximum tokens of prompt and answer; default: the model's, or what memory holds.",
        low=1,
        basic=True,
    )
    stream_options: Mapping[str, Any] | None = key(
        None, "Passed on by chat: {include_usage: true} reports the number of tokens."
    )
    engine: str = key(
        "auto",
        "Inference engine: transformers runs in this process; the others are started as separate programs.",
        choices=("auto", "transformers", "vllm", "sglang", "fastdeploy"),
        basic=True,
    )
    engine_python: str | None = key(
        None, "Python interpreter with the engine installed; default: this one.", path="one"
    )
    engine_args: tuple[str, ...] = key((), "Further arguments for an engine that is started, passed on unchanged.")
    host: str = key("127.0.0.1", "Address of the server; serving other machines requires an API key.")
    port: int = key(8188, "Port of the server; 0 = a free one.", low=0, high=65535, basic=True)
    served_model_name: str | None = key(
        None, "Model name for clients; default: the folder's name. In chat: which of a server's models."
    )
    lora_modules: tuple[str, ...] = key(
        (), "Adapters to serve next to their base: name=DIR.", commas=True, path="named"
    )
    lora_dirs: tuple[str, ...] = key(
        (),
        "Folders below which /v1/load_lora_adapter may read adapters while the server runs; none: it is refused.",
        commas=True,
        path="several",
    )
    api_key_file: str | None = key(
        None, "File with the API key that clients must send; or set ERNIEKIT_API_KEY.", path="one"
    )
    allow_unauthenticated: bool = key(False, "Serve other machines without an API key.")
    server_names: tuple[str, ...] = key((), "Further host names accepted without an API key; * = any.", commas=True)
    max_queue: int = key(64, "Maximum queued requests; further ones get 429 with Retry-After.", low=0)
    request_timeout: float = key(600.0, "Maximum seconds for a request, queueing included.", low=0.1)
    drain_timeout: float = key(25.0, "Seconds that running requests may continue after SIGTERM.", low=0)
    metrics_port: int = key(8001, "Port of the metrics (fastdeploy); otherwise at /metrics.", low=0, high=65535)
    engine_worker_queue_port: int = key(8002, "Port of the engine's queue (fastdeploy).", low=0, high=65535)
    server_tp_degree: int = key(1, "Tensor-parallel devices per model.")
    max_num_seqs: int = key(8, "Maximum sequences in one batch.", low=1)
    max_num_batched_tokens: int = key(384, "Maximum prompt tokens per engine step.", low=1)
    gpu_memory_utilization: float = key(0.9, "Share of GPU memory to use.", low=0, high=1)
    block_size: int = key(64, "Tokens per KV-cache block.", low=1)
    kv_cache_ratio: float = key(0.75, "Share of the cache for prompts (fastdeploy).", low=0, high=1)
    enable_prompt_tokens_details: bool = key(
        True, "Report in usage how many prompt tokens the prefix cache had. Requests with a cache_salt share nothing."
    )
    decoding: str = key(
        "auto",
        "Decoding of the embedded engine. auto = fixed-shape steps, recorded and replayed where the device can. "
        "exact = the model's own forward pass; log-probabilities equal training's bit for bit, and come at the end of "
        "an answer; slower.",
        choices=("auto", "exact"),
    )
    num_speculative_tokens: int = key(
        0,
        "Tokens that the model's MTP layer proposes and one step verifies (embedded engine); the answers stay the "
        "same. 0 = none.",
        low=0,
        high=8,
    )
    use_warmup: int = key(0, "Generate once before the first request.")
    quantization: str | None = key(
        None,
        "Weights on the server: wint8 (int8), wint4 (routed experts int4, the rest int8), or the engine's own names. "
        "The embedded engine quantises them while reading: less memory, not more speed.",
    )
    load_choices: str | None = key(None, "Weight loader (fastdeploy).")
    tool_call_parser: str | None = key(None, "Parser for tool calls (engines that are started).")
    reasoning_parser: str | None = key("ernie-45-vl", "Parser for reasoning (engines that are started).")
    enable_mm: bool = key(
        False, "Accept images and video. The embedded engine does for vision models, unless this is False."
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = key(
        None, "Maximum images and videos per request; the embedded engine's default is {image: 16, video: 1}."
    )
    vision_cache_bytes: int = key(512 << 20, "Host memory for cached image features.", low=0)
