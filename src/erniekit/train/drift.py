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
from erniekit.train.agreement import HostGroup
from erniekit.train.hooks import Hook

if TYPE_CHECKING:
    from erniekit.train.step import StepResult
    from erniekit.train.trainer import Trainer

CHUNK = 1 << 20  # 4-byte words at a time: 8 MiB of weights and 8 MiB of products beside the tensor
_ODD = -0x61C8864680B583EB  # any large odd number: multiplying by it loses nothing modulo 2**64

Named = Iterable[tuple[str, torch.Tensor]]


class ReplicasDiffer(ErnieKitError):
    """Copies that must be equal are not: memory, a link or a kernel changed a number without an error."""

    exit_code = 3


@dataclass(frozen=True)
class Replicas:
    """Tensors this rank holds (its local shards) of which each rank of `group` must hold the same bits.

    A group of one rank is allowed: it has nothing to compare. The order of tensors is the same on all its ranks.
    """

    tensors: Callable[[], Named]
    group: HostGroup


class ReplicaDrift(Hook):
    """Every `every` steps; put it before the hook that saves, so that no damaged copy is written."""

    def __init__(self, sets: Sequence[Replicas], world: HostGroup, every: int) -> None:
        """Every rank of `world` has the same number of sets, so that all make the same calls."""
        self.sets, self.world, self.every = sets, world, every
        self.checks = 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self.every and result.step % self.every == 0:
            self.check(result.step)

    def check(self, step: int) -> None:
        """Raises ReplicasDiffer on all ranks of the world, with the same words, when any set differs anywhere."""
        self.checks += 1
        found = [words for replicas in self.sets if (words := self._compare(replicas))]
        if not self.world.max(len(found)):
            return
        everyone = sorted({words for mine in self.world.gather(found) for words in mine})
        raise ReplicasDiffer(
            f"step {step}: replicas no longer hold the same weights: {everyone[0][0]}",
            where="; ".join(f"{ranks}: {tensors}" for ranks, tensors in everyone),
            fix="test memory and links of that machine; the same command goes on from the last checkpoint",
        )

    def _compare(self, replicas: Replicas) -> tuple[str, str] | None:
        """One digest for the whole set first; tensor by tensor only when it differs."""
        group = replicas.group
        if group.size == 1:
            return None
        prints = fingerprints(replicas.tensors())
        whole = blake2b(repr(prints).encode(), digest_size=16).hexdigest()
        if len(set(group.gather(whole))) == 1:
            return None
        return describe(group.gather((self.world.rank, prints)))


def describe(held: Sequence[tuple[int, Mapping[str, int]]]) -> tuple[str, str]:
    """("rank 2 differs from ranks 0, 1, 3", "layers.3.norm.weight and 2 more") from each rank's fingerprints."""
    names = list(dict.fromkeys(name for _, prints in held for name in prints))
    differing = [name for name in names if len({prints.get(name) for _, prints in held}) > 1]
    odd: set[int] = set()
    for name in differing:
        votes = Counter(prints.get(name) for _, prints in held)
        (most, count), *others = votes.most_common()
        if others and others[0][1] == count:
            most = None  # a draw: nobody can say who is right
        odd |= {rank for rank, prints in held if most is None or prints.get(name) != most}
    rest = sorted({rank for rank, _ in held} - odd)
    who = f"{_ranks(odd)} differ{'s' if len(odd) == 1 else ''} from {_ranks(rest)}" if rest else _draw(odd)
    tensors = differing[0] + (f" and {len(differing) - 1} more" if len(differing) > 1 else "")
    return who, tensors


def _draw(ranks: Iterable[int]) -> str:
    return f"{_ranks(ranks)} differ, with no majority to say which is right"


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def fingerprints(tensors: Named) -> dict[str, int]:
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
