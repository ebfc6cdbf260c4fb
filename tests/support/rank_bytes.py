"""What a rank holds, tensor by tensor: what the planner's short cuts are compared with."""

from __future__ import annotations

from functools import reduce

from erniekit.parallel.sharding import Sharding
from erniekit.planner.static_bytes import NOTHING, StorageKinds, TensorBytes, of_tensor


def of_rank(sharding: Sharding, rank: int, storing: StorageKinds, micro_batches: int = 1) -> TensorBytes:
    held = (name for name in sharding.names() if sharding.holds(name, rank))
    return reduce(TensorBytes.plus, (of_tensor(sharding, name, rank, storing, micro_batches) for name in held), NOTHING)
