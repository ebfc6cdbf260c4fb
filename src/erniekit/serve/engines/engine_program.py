"""How an external engine is started: one `EngineProgram` each in vllm.py, sglang.py and fastdeploy.py.

An external engine listens at our host and port itself: there is no proxy between it and its clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """What is to be served. `given` distinguishes a value that was set from a default."""

    model: Path
    name: str
    adapters: Mapping[str, Path]  # by name, in PEFT's files
    rank: int  # the largest of theirs
    host: str
    port: int
    longest: int
    keys: Mapping[str, Any]  # the serve section, by key
    given: Callable[[str], bool]
    dtype: str | None = None  # bf16 | fp16 | fp32; None: as stored
    device: str = "auto"
    secret: str | None = None  # the API key

    def pass_on(self, **flags: str) -> list[str]:
        """Flags for the keys that were given, by key: an engine's own defaults are better than ours for it."""
        out: list[str] = []
        for key, flag in flags.items():
            if self.given(key) and self.keys[key] is not None:
                value = self.keys[key]
                out += [flag, json.dumps(dict(value)) if isinstance(value, Mapping) else str(value)]
        return out

    def sampling(self) -> dict[str, Any]:
        """Defaults of requests, from the keys that were given."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        out = {name: self.keys[name] for name in names if self.given(name)}
        return out | ({"max_new_tokens": self.keys["max_new_tokens"]} if self.given("max_new_tokens") else {})


@dataclass(frozen=True)
class EngineProgram:
    name: str
    package: str  # importable where the engine is installed
    module: str  # what `python -m` runs
    install: str
    arguments: Callable[[Target, Path], list[str]]  # the folder is for files it needs, private to us
    environment: Callable[[Target], dict[str, str]] = lambda target: {}
    adapters: bool = True  # whether it serves LoRA unmerged


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
