"""Generation and serving. Read by `erniekit chat` and `erniekit server`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

WHOLE = 2**31 - 1


@dataclass(frozen=True)
class ServeSection:
    max_new_tokens: int = key(1024, "Longest answer.", low=1, high=WHOLE, basic=True)
    min_tokens: int = key(0, "Shortest answer.", low=0, high=WHOLE)
    temperature: float = key(0.95, "Randomness; 0 always takes the likeliest token.", low=0, high=2, basic=True)
    top_p: float = key(0.7, "Sample from the likeliest tokens that make up this share.", low=0, high=1, basic=True)
    top_k: int = key(0, "Sample from so many of the likeliest tokens; 0: no limit.", low=0, high=WHOLE)
    frequency_penalty: float = key(0.0, "Against words already said often.", low=-2, high=2)
    presence_penalty: float = key(0.0, "Against words already said.", low=-2, high=2)
    repetition_penalty: float = key(1.0, "Divides the score of words already said.", low=0.01, high=10)
    stream: bool = key(True, "Show the answer as it comes.")
    enable_thinking: bool = key(False, "Let a thinking model think first.")
    max_model_len: int | None = key(
        None,
        "Longest prompt and answer together; when not given the model's own, or what memory holds of it.",
        low=1,
        basic=True,
    )
    stream_options: Mapping[str, Any] | None = key(
        None, "Sent along by chat: {include_usage: true} tells the number of tokens."
    )
    engine: str = key(
        "auto",
        "What answers: transformers is in this process; the others are started as programs of their own.",
        choices=("auto", "transformers", "vllm", "sglang", "fastdeploy"),
        basic=True,
    )
    engine_python: str | None = key(
        None, "The Python that has the engine installed; this one when not given.", path="one"
    )
    engine_args: tuple[str, ...] = key((), "More words for an engine that is started, passed on as they are.")
    host: str = key("127.0.0.1", "Address of the server; listening to other machines needs a key.")
    port: int = key(8188, "Port of the server; 0 takes a free one.", low=0, high=65535, basic=True)
    served_model_name: str | None = key(
        None, "What clients call the model; its folder's name when not given. In chat: which of a server's models."
    )
    lora_modules: tuple[str, ...] = key((), "Adapters to serve beside their base: name=DIR.", commas=True, path="named")
    lora_dirs: tuple[str, ...] = key(
        (),
        "Folders below which /v1/load_lora_adapter may read adapters while the server runs; none: it is refused.",
        commas=True,
        path="several",
    )
    api_key_file: str | None = key(
        None, "File with the key clients must send; the variable ERNIEKIT_API_KEY does the same.", path="one"
    )
    allow_unauthenticated: bool = key(False, "Listen to other machines without a key.")
    server_names: tuple[str, ...] = key((), "Further names of a server without a key; *: any name.", commas=True)
    max_queue: int = key(64, "Answers that may wait; further requests get 429 with Retry-After.", low=0)
    request_timeout: float = key(600.0, "Seconds an answer may take, waiting included.", low=0.1)
    drain_timeout: float = key(25.0, "Seconds running answers may go on after SIGTERM.", low=0)
    metrics_port: int = key(8001, "Port of the metrics (fastdeploy); else they are at /metrics.", low=0, high=65535)
    engine_worker_queue_port: int = key(8002, "Port of the engine's queue (fastdeploy).", low=0, high=65535)
    server_tp_degree: int = key(1, "Devices one model is spread over; tensor_parallel_degree.")
    max_num_seqs: int = key(8, "Requests at once.", low=1)
    max_num_batched_tokens: int = key(384, "Tokens of prompts per engine step.", low=1)
    gpu_memory_utilization: float = key(0.9, "Share of GPU memory to use.", low=0, high=1)
    block_size: int = key(64, "Tokens per cache block.", low=1)
    kv_cache_ratio: float = key(0.75, "Share of the cache for prompts (fastdeploy).", low=0, high=1)
    enable_prompt_tokens_details: bool = key(
        False, "Say in usage how many tokens of a prompt were cached; it shows what others have asked."
    )
    decoding: str = key(
        "auto",
        "How the embedded engine computes. auto: where the device can, steps of fixed shapes, recorded and replayed. "
        "exact: by the model's own forward pass, as training computes; slower.",
        choices=("auto", "exact"),
    )
    use_warmup: int = key(0, "Answer once before the first request.")
    quantization: str | None = key(
        None,
        "Weights on the server: wint8 (int8), wint4 (routed experts int4, the rest int8), or the engine's own words. "
        "The embedded engine packs them as they are read: less memory, not more speed.",
    )
    load_choices: str | None = key(None, "Weight loader (fastdeploy).")
    tool_call_parser: str | None = key(None, "Reads tool calls from answers (engines that are started).")
    reasoning_parser: str | None = key("ernie-45-vl", "Reads thoughts from answers (engines that are started).")
    enable_mm: bool = key(
        False, "Take images and video. The embedded engine does if the model sees, unless this is False."
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = key(
        None, "Most images and videos of a request, e.g. {image: 16, video: 1}, which is the embedded engine's default."
    )
    vision_cache_bytes: int = key(
        512 << 20, "Host memory for features of pictures, so that one shown again is not computed again.", low=0
    )
