"""The engines. The embedded one runs in the server's process; the external ones are programs that it starts."""

from __future__ import annotations

from erniekit.registry import Registry

EMBEDDED = "transformers"
# Programs with an OpenAI interface of their own: how to start them, each an `EngineProgram`.
EXTERNAL = Registry(
    "engine",
    {
        "vllm": "erniekit.serve.engines.vllm:PROGRAM",
        "sglang": "erniekit.serve.engines.sglang:PROGRAM",
        "fastdeploy": "erniekit.serve.engines.fastdeploy:PROGRAM",
    },
)
