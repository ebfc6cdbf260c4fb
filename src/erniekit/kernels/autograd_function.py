"""torch's Function with types for `apply`, which torch leaves without. Used by every room whose backward is its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        @classmethod  # mypy counts a call of what a class inherits as a call of that class: of ours, not of torch's
        def apply(cls, *args: Any, **kwargs: Any) -> Any: ...

else:
    Function = torch.autograd.Function
