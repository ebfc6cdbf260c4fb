"""The sharding rules a model's PLAN is written in, and what each rule cuts. Tables only: no torch, no ranks.

models/*.py declare PLAN; sharding.py turns it into boxes, tensor.py into local weights and collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

Range = tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """kind: heads | heads_in | column | row | vocab | experts | experts_in | replicate | dealt."""

    kind: str
    parts: int = 1  # column: equal parts end to end in the rows (gate, up)

    @property
    def splits_output(self) -> bool:
        return self.kind in ("heads", "column", "vocab")

    @property
    def is_whole(self) -> bool:
        return self.kind in ("replicate", "dealt")

    @property
    def is_experts(self) -> bool:
        return self.kind in ("experts", "experts_in")


def heads() -> Rule:
    """A fused qkv: query heads are dealt out, each rank also has the kv heads its queries look at."""
    return Rule("heads")


def heads_in() -> Rule:
    """The attention's output projection: its columns follow the query heads."""
    return Rule("heads_in")


def column(parts: int = 1) -> Rule:
    return Rule("column", parts)


def row() -> Rule:
    return Rule("row")


def vocab() -> Rule:
    return Rule("vocab")


def experts(parts: int = 1) -> Rule:
    """All experts' rows one below the other; each expert's are `parts` equal parts. Whole experts are dealt out where
    experts are spread, else each is cut as a column."""
    return Rule("experts", parts)


def experts_in() -> Rule:
    """The projection that follows: whole experts, else each one's columns."""
    return Rule("experts_in")


def replicate() -> Rule:
    """Whole on every rank, and each applies it to the same numbers: gradients are equal already."""
    return Rule("replicate")


def dealt() -> Rule:
    """Whole on every rank, and each applies it to things of its own: gradients are summed. A weight over the channels
    of a head, where heads are cut (a norm of queries and keys); a tower, whose items are dealt out
    (dealt_inputs.py)."""
    return Rule("dealt")


Plan = dict[str, Rule]


def rule_of(plan: Plan, module: str) -> Rule:
    """The rule of a module by its name; what no pattern names is replicated."""
    return next((rule for pattern, rule in plan.items() if fnmatchcase(module, pattern)), replicate())


def share(count: int, ranks: int, rank: int) -> Range:
    """Contiguous and as even as can be: the first count % ranks ranks have one more."""
    base, more = divmod(count, ranks)
    start = rank * base + min(rank, more)
    return start, start + base + (rank < more)


@dataclass(frozen=True)
class HeadShare:
    """Which heads a rank computes. Heads need not divide: shares differ in size, kv heads are repeated where shared."""

    queries: Range
    kvs: Range
    kv_of: tuple[int, ...]  # for each local query head, its local kv head

    @property
    def uniform(self) -> bool:
        """Each local kv head serves equally many consecutive queries: plain grouped attention needs no help."""
        q, kv = len(self.kv_of), self.kvs[1] - self.kvs[0]
        return kv > 0 and q % kv == 0 and self.kv_of == tuple(i // (q // kv) for i in range(q))


def head_share(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> HeadShare:
    start, stop = share(num_heads, ranks, rank)
    group = num_heads // num_kv_heads
    kv = [j // group for j in range(start, stop)]
    first, last = (kv[0], kv[-1] + 1) if kv else (0, 0)
    return HeadShare((start, stop), (first, last), tuple(h - first for h in kv))
