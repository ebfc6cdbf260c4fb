"""Silent corruption: replicas must hold the same bits, and every so many steps they prove it. Hooked in by recipes/.

A fingerprint per tensor is an integer sum, so neither the order of additions nor the kind of device changes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from erniekit.errors import ErnieKitError
from erniekit.parallel.sharding import Box, Sharding
from erniekit.train.agreement import HostGroup
from erniekit.train.hooks import Hook, TrainingLoop

if TYPE_CHECKING:
    from erniekit.train.step import StepResult

CHUNK = 1 << 20  # 4-byte words at a time: 8 MiB of weights and 8 MiB of products besides the tensor
_ODD = -0x61C8864680B583EB  # any large odd number: multiplying by it loses nothing modulo 2**64

_FIX = "test memory and links of that machine; the same command resumes from the last checkpoint"
# A wrong sharding rule shows at the first check; broken hardware may show at any.
_PLAN = "for a model of your own, check its sharding table first (`plan` of its SPEC; docs/adding-a-model.md); else "
_OVER_TENSOR = "tp "  # begins the key of a set of ranks with tensor-parallel ones: all ranks then say the same


class ReplicasDiffer(ErnieKitError):
    """Copies that must be equal are not: memory, a link or a kernel changed a number without an error."""

    exit_code = 3


@dataclass(frozen=True)
class Block:
    """Part of a local tensor of which all `ranks` must hold the same bits."""

    name: str  # of the parameter
    ranks: tuple[int, ...]  # in the world, this one among them
    local: tuple[slice, ...] = ()  # where it lies in this rank's tensor; () is all of it
    label: str = ""  # the name for people, with the rows where it is not the whole parameter
    over_tensor: bool = False  # some are tensor-parallel ranks: that these hold copies follows from the model's plan

    def __str__(self) -> str:
        return self.label or self.name


def replicated(sharding: Sharding, rank: int) -> list[Block]:
    """Everything that another rank holds as well: copies of data parallelism, of a tensor that tensor parallelism
    leaves whole, of a kv head that several ranks repeat, of tied embeddings on two pipeline stages."""
    layout, found = sharding.layout, []
    twins: dict[bool, list[int]] = {}  # of each rank the first that holds the same; experts may be spread another way
    for name in sharding.names():
        kind = sharding.is_expert(name)
        if kind not in twins:
            twins[kind] = [sharding.twin(name, other) for other in range(layout.size)]
        alike = twins[kind]
        held = {r: {_key(box): box for box in sharding.boxes(name, r)} for r in sorted(set(alike))}
        for key, box in held[alike[rank]].items():
            ranks = tuple(r for r in range(layout.size) if key in held[alike[r]])
            if len(ranks) > 1:
                rows = box.global_slices[0]
                whole = (rows.start, rows.stop) == (0, sharding.shape(name)[0])
                label = "" if whole else f"{name}[{rows.start}:{rows.stop}]"
                over_tensor = len({layout.coords(r)["tp"] for r in ranks}) > 1
                found.append(Block(name, ranks, box.local_slices, label, over_tensor))
    return found


def _key(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in box.global_slices)


class ReplicaDrift(Hook):
    """Every `every` steps, after the first step of a process, and before each save (Saver.before), so that no damaged
    copy is written."""

    def __init__(
        self,
        blocks: Sequence[Block],
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        world: HostGroup,
        every: int,
    ) -> None:
        """`tensors()` are this rank's local tensors by name: all, or those that train. All ranks of the world call
        `check` at the same steps."""
        self.blocks, self.tensors, self.world, self.every = blocks, tensors, world, every
        self.checks = 0
        self.equal = False  # the copies, as they are now

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return bool(self.every) and self.world.size > 1 and (not self.checks or step % self.every == 0)

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.equal = False
        if self.waits_for(trainer, result.step):
            self.check(result.step)

    def check(self, step: int) -> None:
        """Raises ReplicasDiffer on all ranks of the world, with the same message, when any copies differ anywhere.

        One digest per set of ranks first; block by block only for the sets that differ. A second check of the same
        step, by a save, does nothing."""
        if self.equal:
            return
        self.checks += 1
        mine = self._fingerprints()
        digests = {key: blake2b(repr(prints).encode(), digest_size=8).digest() for key, prints in mine.items()}
        by_key: dict[str, set[bytes]] = {}
        for row in self.world.gather(digests):
            for key, digest in row.items():
                by_key.setdefault(key, set()).add(digest)
        differing = {key for key, different in by_key.items() if len(different) > 1}
        if not differing:
            self.equal = True
            return
        rows = self.world.gather({key: prints for key, prints in mine.items() if key in differing})
        found = [describe([(r, row[key]) for r, row in enumerate(rows) if key in row]) for key in sorted(differing)]
        raise ReplicasDiffer(
            f"step {step}: replicas no longer hold the same weights: {'; '.join(sorted({text for text, _ in found}))}",
            where="; ".join(sorted({what for _, what in found})),
            fix=(_PLAN if self.checks == 1 and any(key.startswith(_OVER_TENSOR) for key in differing) else "") + _FIX,
        )

    def _fingerprints(self) -> dict[str, dict[str, int]]:
        """For each set of ranks that share blocks, under a short key: every block's fingerprint."""
        tensors = self.tensors()
        blocks = [block for block in self.blocks if block.name in tensors]
        prints = fingerprints((str(block), tensors[block.name][block.local]) for block in blocks)
        out: dict[str, dict[str, int]] = {}
        for block in blocks:
            key = _OVER_TENSOR * block.over_tensor + blake2b(repr(block.ranks).encode(), digest_size=8).hexdigest()
            out.setdefault(key, {})[str(block)] = prints[str(block)]
        return out


def describe(held: Sequence[tuple[int, Mapping[str, int]]]) -> tuple[str, str]:
    """("rank 2 differs from ranks 0, 1, 3", "layers.3.norm.weight and 2 more") from each rank's fingerprints."""
    names = list(dict.fromkeys(name for _, prints in held for name in prints))
    differing = [name for name in names if len({prints.get(name) for _, prints in held}) > 1]
    odd: set[int] = set()
    for name in differing:
        votes = Counter(prints.get(name) for _, prints in held)
        (most, count), *others = votes.most_common()
        if others and others[0][1] == count:
            most = None  # a draw: no majority
        odd |= {rank for rank, prints in held if most is None or prints.get(name) != most}
    rest = sorted({rank for rank, _ in held} - odd)
    text = f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(rest)}" if rest else _draw(odd)
    tensors = differing[0] + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
    return text, tensors


def _draw(ranks: Iterable[int]) -> str:
    return f"{_ranks(ranks)} differ, with no majority to say which is right"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """By name; one copy to the host for all of them."""
    made = {name: fingerprint(tensor) for name, tensor in tensors}
    if not made:
        return {}
    device = next(iter(made.values())).device
    return dict(zip(made, torch.stack([value.to(device) for value in made.values()]).tolist()))


def fingerprint(tensor: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """A 64-bit integer of the tensor's bits, as a tensor on its device: any one changed element changes it for sure,
    any other change all but surely. Equal on every device and for every reduction order."""
    words = _as_words(tensor.detach())
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        # Horner over chunks: their order counts too. Sums and products are modulo 2**64.
        total = total * _ODD + (part * weights[: part.numel()]).sum()
    return total


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as 4-byte integers; a copy only when they are not aligned or not a multiple of four. Eight bytes
    would be read faster, but their products would lose the upper bits: two flipped signs could cancel."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 4:
        raw = torch.nn.functional.pad(raw, (0, 4 - raw.numel() % 4))
    elif raw.storage_offset() % 4:
        raw = raw.clone()
    return raw.view(torch.int32)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd, so that no single change is lost, and without a pattern that changes of neighbours could follow."""
    numbers = torch.arange(1, CHUNK + 1, device=device) * _ODD
    return ((numbers ^ (numbers >> 32)) * _ODD) | 1
