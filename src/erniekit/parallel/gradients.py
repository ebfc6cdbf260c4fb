"""After backward, before the update: every rank's gradients become those of the whole batch, and their one norm.

Called by engine.py. What fsdp has reduced already is not touched.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch.distributed import ProcessGroup

from erniekit.kernels.wide_squares import sum_of_squares
from erniekit.parallel import comm
from erniekit.parallel.layout import AXES
from erniekit.parallel.mesh import World
from erniekit.parallel.reduce import all_reduce
from erniekit.parallel.sharding import Box, Sharding

BUCKET = 64 * 1024 * 1024  # elements reduced in one call


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own memory of a tensor that fsdp may have spread."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


class GradientSync:
    def __init__(self, names: list[str], sharding: Sharding, world: World) -> None:
        """names: the trainable tensors this rank holds, in one order on all ranks of a stage."""
        self.names, self.sharding, self.world = names, sharding, world
        layout = world.layout
        self.partial = [n for n in names if layout.tp > 1 and self._partial_over_tp(n)]
        self.repeated = [n for n in names if layout.tp > 1 and self._repeated(n)]
        self.tied = [n for n in names if len(sharding.pp_ranks_of(n)) > 1]
        # What counts for the norm: where experts differ between data ranks, the first copy of everything in the world;
        # else every copy of the model counts for itself.
        apart = layout.experts_over_data
        first = {n: world.rank if apart else sharding.twin(n, world.rank) for n in names}
        self.counted: dict[str, tuple[Box, ...]] = {n: dict(sharding.holders(n)).get(first[n], ()) for n in names}
        spread = ("fsdp", "cp") if layout.fsdp > 1 else ()
        self.model_group = world.joined(*AXES) if apart else world.joined("pp", "tp", *spread)
        self.heads_group = world.joined("tp", *spread) if self._any_repeated() else None
        twice = sharding.embeds_last and layout.pp > 1
        self.tied_group = world.joined("pp", only=(0, layout.pp - 1)) if twice else None
        self.replica_group = world.joined("dp", "cp") if layout.fsdp == 1 else None
        # Experts over data ranks have seen all tokens of the ranks they serve; only ranks with the same ones add up.
        self.dealt = dict.fromkeys(n for n in names if apart and sharding.is_expert(n))
        self.copies_group = world.copies_group() if layout.fsdp == 1 else None
        # fully_shard took their mean over the copies; the loss was multiplied for a mean over all data ranks.
        self.dealt_scale = layout.expert_copies / (layout.data_ranks * layout.cp) if layout.fsdp > 1 else 1.0

    def _partial_over_tp(self, name: str) -> bool:
        """Whole on every tensor-parallel rank, yet each saw only its part: adapters' inner sides, and under sequence
        parallelism all that works on slices of the sequence (norms, biases added after the sum)."""
        if not self.sharding.whole_on_every_tp_rank(name):
            return False
        if self.sharding.is_expert(name) and self.world.layout.experts_over == "world":
            return False  # tensor-parallel ranks are among those that hold other experts, or copies
        adapts_a_cut_linear = ".lora." in name and self.sharding.rule(name).kind != "replicate"
        if self.sharding.rule(name).kind == "dealt":
            return True
        return adapts_a_cut_linear or self.world.layout.sequence_parallel

    def _repeated(self, name: str) -> bool:
        if self.sharding.is_expert(name):
            return False
        ranges = [r for t in range(self.world.layout.tp) for r in self.sharding.rows_cut(name, t)]
        return sum(b - a for a, b in ranges) > self.sharding.shape(name)[0]

    def _any_repeated(self) -> bool:
        """The same on every rank, whichever layers it holds: groups are made together."""
        return self.world.layout.tp > 1 and any(self._repeated(n) for n in self.sharding.names())

    def reduce(self, grads: Mapping[str, torch.Tensor], done: Container[str] = ()) -> None:
        """grads of all names, fp32; changed in place. done: those that are sums already (overlapped_reduce.py)."""
        if self.partial:
            _all_reduce([local(grads[n]) for n in self.partial], self.world.group("tp"))
        for name in self.repeated:
            self._sum_repeated_rows(name, local(grads[name]))
        if self.tied and self.tied_group is not None:
            _all_reduce([local(grads[n]) for n in self.tied], self.tied_group)
        dealt = [local(grads[n]) for n in self.dealt]
        if self.dealt_scale != 1.0 and dealt:
            torch._foreach_mul_(dealt, self.dealt_scale)
        if self.copies_group is not None:
            _all_reduce(dealt, self.copies_group)
        if self.replica_group is not None:
            # By the names this was made for: a gradient that one rank lacks would shift all others behind it.
            left = [n for n in self.names if n not in self.dealt and n not in done]
            _all_reduce([local(grads[n]) for n in left], self.replica_group)

    def _sum_repeated_rows(self, name: str, grad: torch.Tensor) -> None:
        """kv heads that several ranks hold: each has the gradient of its own queries; all get the sum."""
        whole = grad.new_zeros(self.sharding.shape(name))
        boxes = self.sharding.boxes(name, self.world.rank)
        for box in boxes:
            whole[box.global_slices] += grad[box.local_slices]
        comm.all_reduce(whole, self.heads_group)
        for box in boxes:
            grad[box.local_slices] = whole[box.global_slices]

    def norm(self, grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of the whole model's gradient, each element counted once, the same bits on every rank."""
        device = next((local(g).device for g in grads.values()), torch.device("cpu"))
        pieces = (local(grad)[box.local_slices] for name, grad in grads.items() for box in self.counted[name])
        total = sum_of_squares(pieces, device)
        if self.model_group is not None:
            all_reduce(total, self.model_group)
        return total.sqrt().float()


def _all_reduce(tensors: list[torch.Tensor], group: ProcessGroup | None) -> None:
    """In buckets: few calls, bounded memory."""
    bucket: list[torch.Tensor] = []
    held = 0
    for k, tensor in enumerate(tensors):
        bucket.append(tensor)
        held += tensor.numel()
        if held >= BUCKET or k == len(tensors) - 1:
            flat = torch.cat([t.reshape(-1) for t in bucket])
            all_reduce(flat, group)
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket])):
                t.copy_(part.view_as(t))
            bucket, held = [], 0
