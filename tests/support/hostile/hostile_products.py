"""A vendor's products: none in bf16, none of groups. Operators that raise take their place for the whole process, where
every caller meets them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def break_products(dispatch_key: str) -> torch.library.Library:
    """The operators live as long as the library that brought them: it is kept, and a second call changes nothing."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, dispatch_key, allow_override=True)
    if hasattr(torch.ops.aten, "_grouped_mm"):
        library.impl("_grouped_mm", _grouped, dispatch_key, allow_override=True)
    return library


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.bfloat16:
        raise RuntimeError("hostileBlas: bf16 is not implemented")
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _grouped(*args: Any, **more: Any) -> torch.Tensor:
    raise NotImplementedError("hostileBlas: no grouped product")
