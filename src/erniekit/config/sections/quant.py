"""Training on quantised numbers. Declared for the recipes that carry it; not_yet_supported.py refuses it by name."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key

_FP8 = "fp8 training"


@dataclass(frozen=True)
class QuantSection:
    weight_quantize_algo: str | None = key(
        None,
        "frozen_base, in the script form; set from compute_type.",
        choices=("weight_only_mix", "weight_only_int8", "weight_only_int4", "nf4", "fp8linear"),
    )
    apply_hadamard: bool = key(True, "Rotate activations before quantising.", fixed=True, later=_FP8)
    hadamard_block_size: int = key(32, "Size of the rotation.", low=1, fixed=True, later=_FP8)
    quant_input_grad: bool = key(False, "Quantise gradients of inputs.", fixed=True, later=_FP8)
    quant_weight_grad: bool = key(False, "Quantise gradients of weights.", fixed=True, later=_FP8)
    apply_online_actscale_step: int = key(200, "Steps before scales are frozen.", low=0, fixed=True, later=_FP8)
    actscale_moving_rate: float = key(0.01, "How fast scales move.", low=0, high=1, fixed=True, later=_FP8)
    fp8_format_type: str = key("hybrid", "Formats.", choices=("hybrid", "e4m3"), fixed=True, later=_FP8)
    use_fp8: bool = key(False, "fp8 of the pre-training path.", fixed=True, later=_FP8)
    fp8_force_clear_state: bool = key(False, "Drop saved scales.", later=_FP8)
    enable_fp8_quantize_analysis: bool = key(False, "Log quantisation errors.", later=_FP8)
    optim_shard_num: int = key(1, "Files per optimiser state.", low=1, later=_FP8)
