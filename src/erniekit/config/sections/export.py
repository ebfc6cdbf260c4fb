"""Merging adapters and cutting weights into files. Read by `erniekit export` and `erniekit split`."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class ExportSection:
    max_shard_size: int = key(5, "Largest weight file, in GB.", low=1, basic=True)
    copy_tokenizer: bool = key(True, "Put the tokenizer beside the weights.", basic=True)
