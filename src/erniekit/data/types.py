"""The nouns of the data path, in the order a line meets them: Conversation -> Sample -> Pack -> Batch.

Everything before Batch is plain Python and numpy; only `Batch` holds torch tensors (built in collate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

IGNORE = -100  # a label that is not trained


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant | tool
    content: str
    trained: bool = True  # assistant messages only: whether this answer carries loss
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Problem:
    """A row that cannot be used, or was dropped by a rule. `kind` is a short slug that reports count by."""

    file: str
    line: int  # 1-based line (JSONL) or row number (JSON array, parquet)
    kind: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """One training example. labels[i] is the target of position i (already shifted); IGNORE where not trained."""

    ids: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]


@dataclass(frozen=True)
class Pack:
    """Samples that share one row; attention never crosses from one to the next."""

    samples: tuple[Sample, ...]
    index: int = 0  # global pack number: what a resume counts


@dataclass
class Batch:
    """One micro-batch. A row is documents end to end, then padding (its own last document, never trained)."""

    input_ids: torch.Tensor  # int64 [B, L]
    labels: torch.Tensor  # int64 [B, L], shifted, IGNORE where not trained
    positions: torch.Tensor  # int64 [B, L], restart at 0 in each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], bounds in the flattened [B * L] tokens; rows are bounds too
    max_doc: int  # longest document
    num_label_tokens: int  # labels != IGNORE
    num_tokens: int = 0  # real tokens, padding apart
    pack_indices: tuple[int, ...] = field(default_factory=tuple)  # which packs these rows are, for reports
    packed: bool = True  # some row holds more than one document (padding apart)
    sum_squares: int = 0  # sum of squared document lengths, for FLOP counts

    def documents(self) -> torch.Tensor | None:
        """cu_seqlens for the model; None when plain causal rows say the same: padding comes last, nobody sees it."""
        return self.cu_seqlens if self.packed else None

    def to(self, device: torch.device) -> Batch:
        if device.type == "cpu":
            return self
        moved = {k: getattr(self, k).to(device, non_blocking=True) for k in TENSORS}
        return replace(self, **moved)


TENSORS = ("input_ids", "labels", "positions", "cu_seqlens")
