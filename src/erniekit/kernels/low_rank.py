"""Low-rank updates of experts, as products take them. Called by the expert ops, grouped products and kernels/stored.

E experts, R rows sorted by expert.
"""

from __future__ import annotations

import torch

Low = tuple[torch.Tensor, float]  # a factor [E, rank, width], any strides, and what its product is scaled by
Tail = tuple[torch.Tensor, torch.Tensor]  # narrow rows [R, rank] and their factor [E, rank, width]
