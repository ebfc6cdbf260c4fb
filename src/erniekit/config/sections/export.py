"""Merging adapters and cutting weights into files. Read by `erniekit export` and `erniekit split`."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.weight_kinds import BASES, BF16, WEIGHT_KINDS

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4")


@dataclass(frozen=True)
class ExportSection:
    max_shard_size: int = key(5, "Maximum size of a weight file, in GB.", low=1, basic=True)
    copy_tokenizer: bool = key(True, "Copy the tokenizer next to the weights.", basic=True)
    merge_grid: str = key(
        BF16,
        "Merge the adapter into weights quantised as this frozen_base and round the sum to the same grid; reports how "
        "much of the update is lost.",
        choices=BASES,
        further=WEIGHT_KINDS,
    )
    format: str = key(
        "safetensors",
        "What export writes: a model folder (safetensors), or one file for llama.cpp and Ollama (gguf).",
        choices=("safetensors", "gguf"),
        basic=True,
    )
    gguf_type: str = key(
        "q8_0",
        "How a GGUF file stores weights; mxfp4 and q4_0 take about 4.5 bits each.",
        choices=GGUF_TYPES,
        basic=True,
    )
