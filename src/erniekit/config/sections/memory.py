"""What trades time for memory. Read by the recipes when they build and step the model."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class MemorySection:
    recompute: bool = key(False, "Recompute activations: less memory, a third more time.", basic=True)
    recompute_granularity: str = key(
        "full",
        "What to recompute: whole layers, or attention only; auto = as few whole layers as the memory requires.",
        choices=("full", "full_attn", "core_attn", "selective", "auto"),
    )
    memory_limit: float | None = key(
        None, "GiB of device memory that recompute_granularity: auto may use; default: nearly all.", low=0
    )
    frozen_layers_in_host: int | None = key(
        None,
        "Layers whose packed frozen weights (frozen_base) are kept in host memory and copied to the device ahead of "
        "use; default: as few as memory_limit, or the device's memory, requires.",
        low=0,
    )
    no_recompute_layers: tuple[int, ...] = key((), "Layers that are not recomputed.", low=0)
    loss_subbatch_seqlen: int = key(2048, "Tokens per chunk of the loss; lower it for a large vocabulary.", low=1)
    gc_interval: int = key(0, "Run Python's garbage collector every N steps; 0 = Python's default.", low=0)
    offload_optim: bool = key(
        False,
        "Keep optimiser states (master weights and moments) in host memory; those of a few tensors at a time are "
        "copied to the device, overlapped with computation where it has streams.",
    )
    tensorwise_offload_optimizer: bool = key(
        False, "offload_optim with the fewest tensors on the device at a time; for runs that still do not fit."
    )
    offload_recompute_inputs: bool = key(
        False, "Keep the inputs of recomputed layers in host memory; for long sequences, with recompute on."
    )
