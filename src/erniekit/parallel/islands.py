"""Islands: which ranks share a collective library, where a job has unlike devices. Made by world.py.

Everything inside a pipeline stage stays within an island and uses its own library; between islands there is only the
pipeline, and sums of a few numbers, both through host memory (boundary.py, reduce.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from erniekit.errors import PlanError
from erniekit.parallel.layout import Layout

ACROSS = "gloo"  # of groups that reach over several islands


@dataclass(frozen=True)
class Islands:
    interconnects: tuple[str, ...]  # of each rank: what its collective library can connect to
    backends: tuple[str, ...]  # of each rank, as torch.distributed names it

    def alike(self, ranks: Sequence[int]) -> bool:
        return len({self.interconnects[rank] for rank in ranks}) == 1

    def backend(self, ranks: Sequence[int]) -> str:
        """Of a group of these."""
        return self.backends[ranks[0]] if self.alike(ranks) else ACROSS

    def describe(self) -> str:
        out, first = [], 0
        for interconnect, ranks in groupby(self.interconnects):
            last = first + len(list(ranks)) - 1
            out.append(f"{interconnect}: ranks {first} to {last}" if last > first else f"{interconnect}: rank {first}")
            first = last + 1
        return ", ".join(out)

    def stage_interconnects(self, layout: Layout) -> list[str]:
        """Of each pipeline rank."""
        return [self.interconnects[layout.rank(pp=pp)] for pp in range(layout.pp)]


def check_islands(islands: Islands, layout: Layout) -> None:
    """Stages within islands, islands in one piece, and nothing that only one collective library can do."""
    each = layout.size // layout.pp
    split = next((s for s in range(layout.pp) if not islands.alike(range(s * each, (s + 1) * each))), None)
    if split is not None:
        first = split * each
        interconnects = " and ".join(dict.fromkeys(islands.interconnects[first : first + each]))
        raise PlanError(
            f"pipeline stage {split} would be on {interconnects} (ranks {first} to {first + each - 1}), which share no "
            f"collective library; {islands.describe()}",
            where="islands, pipeline_parallel_degree",
            fix="choose degrees so that the ranks of a stage (all degrees but the pipeline's multiplied) divide every "
            "island",
        )
    runs = [interconnect for interconnect, _ in groupby(islands.interconnects)]
    if len(runs) > len(set(runs)):
        raise PlanError(
            f"an island is in several pieces: {islands.describe()}",
            where="islands",
            fix="give neighbouring ranks the same kind of device",
        )
    if layout.fsdp > 1:
        raise PlanError(
            "sharded weights on unlike devices are not in this version",
            where="islands, sharding_parallel_degree",
            fix="sharding_parallel_degree: 1; data_parallel_degree and tensor_parallel_degree work inside islands",
        )
