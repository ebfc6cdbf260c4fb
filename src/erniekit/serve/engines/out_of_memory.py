"""Whether an error is that of a device without memory left, whoever raised it. Used by recorded.py and embedded.py."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """torch's own error, or the driver's words for it; or an error that followed one, as ending a capture may raise."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, torch.OutOfMemoryError):
            return True
        if isinstance(at, RuntimeError) and ("out of memory" in str(at) or "ALLOC_FAILED" in str(at)):
            return True
        at = at.__cause__ or at.__context__
    return False


def reason(error: BaseException, memory_key: str) -> str:
    """For a note; memory_key: what leaves more memory if lowered."""
    told = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
    return f"{told}; a lower {memory_key} leaves more memory" if is_out_of_memory(error) else told
