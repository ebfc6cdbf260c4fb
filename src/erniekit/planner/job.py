"""Job: a run in numbers, whatever cluster it will be on. Made by recipes/planning.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from erniekit.kernels.stored import multiplied_in_fp8
from erniekit.models.config import DecoderConfig
from erniekit.parallel.layout import CONFIG_KEYS, Layout
from erniekit.planner.static_bytes import TensorBlocks
from erniekit.weight_kinds import BF16, PLAIN, kinds_of


@dataclass(frozen=True)
class Job:
    model: DecoderConfig
    blocks: TensorBlocks
    rows: int  # packs of a micro-batch on one data rank
    length: int  # tokens of a pack
    packs: int  # of a step, on all ranks together
    rank: int = 0  # LoRA's; 0: every weight is trained
    adapters_met: int = 0  # LoRA weights a token meets, for the count of FLOPs
    document: int = 0  # tokens of a usual document; 0: as long as a pack
    trained: float = 1.0  # share of tokens with a label
    head_rows: int = 2048
    recompute: str = ""  # none, a granularity, or auto: as few whole layers as fit
    recomputed: int | None = None  # layers of each rank that are; None: by `recompute`
    forwards: int = 0  # passes of this model over the rows without gradient: a live reference's, KTO's baseline
    teacher: DecoderConfig | None = None  # another model, whole on every rank, that runs forward as well
    data_only: bool = False  # no axis but data parallelism and sharding
    compute: int = 2  # bytes
    offload_optimiser: bool = False
    vision_kept: float = 0.0  # bytes that a vision tower and its resampler keep of a micro-batch
    schedule: str = "auto"  # of a pipeline
    replayed: bool = False  # layers are: the host launches none of their kernels
    attention: str = "flash4"  # the kernel for rows of one document, as kernels/selection.py names it
    packed_attention: str = "flash4"  # for documents in packs
    base: str = BF16  # what frozen weights are kept as, and what they are multiplied in
    products: str = BF16
    # What evaluate.py has computed, for layouts that are alike in it.
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stored(self, role: str) -> str:
        """The kind of weights of a role."""
        return kinds_of(self.base).get(role, PLAIN)

    def in_fp8(self, role: str) -> bool:
        return multiplied_in_fp8(self.base, self.products, role)

    @property
    def documents(self) -> float:
        return min(self.document or self.length, self.length)

    def micro_batches(self, layout: Layout) -> int:
        """0: the step's packs do not divide over the data ranks."""
        each = self.rows * layout.data_ranks
        return self.packs // each if self.packs % each == 0 else 0


def keys_of(layout: Layout, micro_batches: int) -> dict[str, Any]:
    """A layout as a recipe writes it."""
    out: dict[str, Any] = {key: getattr(layout, axis) for axis, key in CONFIG_KEYS.items()}
    if layout.fsdp > 1:
        out["sharding"] = f"stage{layout.sharding_stage}"
    out["sequence_parallel"] = layout.sequence_parallel
    if layout.pp > 1:
        out["virtual_pp_degree"] = layout.virtual_stages
    if layout.experts != "none":
        out["moe_group"] = {"tp": "mp", "data": "ep", "world": "world"}[layout.experts]
        if layout.ep:
            out["expert_parallel_degree"] = layout.ep
    out["gradient_accumulation_steps"] = micro_batches
    return out
