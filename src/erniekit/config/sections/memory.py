"""What trades time for memory. Read by the recipes when they build and step the model."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class MemorySection:
    recompute: bool = key(False, "Much less memory for about a third more time.", basic=True)
    recompute_granularity: str = key(
        "full",
        "How much: whole layers, or attention only; auto: as few whole layers as the device's memory asks for.",
        choices=("full", "full_attn", "core_attn", "selective", "auto"),
    )
    memory_limit: float | None = key(
        None, "GiB of the device that recompute_granularity: auto plans with; nearly all of it when not given.", low=0
    )
    frozen_layers_in_host: int | None = key(
        None,
        "Layers whose packed frozen weights (frozen_base) wait in host memory and are copied to the device ahead of "
        "use; not given: as few as memory_limit, or the device's memory, asks for.",
        low=0,
    )
    no_recompute_layers: tuple[int, ...] = key((), "Layers kept as they are.", low=0)
    loss_subbatch_seqlen: int = key(
        2048, "Rows of logits alive at once in the loss; lower it for a huge vocabulary.", low=1
    )
    gc_interval: int = key(0, "Run Python's garbage collector every N steps; 0 leaves it alone.", low=0)
    offload_optim: bool = key(
        False,
        "Keep optimiser states (masters and moments) in host memory; those of a few tensors at a time come to the "
        "device, beside the computation where it has streams.",
    )
    tensorwise_offload_optimizer: bool = key(
        False, "The same, with the states of the fewest tensors on the device; when offload_optim still does not fit."
    )
    offload_recompute_inputs: bool = key(
        False, "Keep what recompute starts from in host memory; for long sequences, with recompute on."
    )
