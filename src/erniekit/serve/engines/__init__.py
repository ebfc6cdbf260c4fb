"""ENGINES: what can answer requests. The embedded one lives in the server's process; the others are started."""

from __future__ import annotations

from erniekit.registry import Registry

EMBEDDED = "transformers"
# Programs with an OpenAI interface of their own: how to start them, each a `Launch`.
STARTED = Registry(
    "engine",
    {
        "vllm": "erniekit.serve.engines.vllm:LAUNCH",
        "sglang": "erniekit.serve.engines.sglang:LAUNCH",
        "fastdeploy": "erniekit.serve.engines.fastdeploy:LAUNCH",
    },
)
