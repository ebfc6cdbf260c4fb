"""Training on quantised numbers: fp8 (docs/fp8-qat.md). Read by recipes/fp8_training.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class QuantSection:
    weight_quantize_algo: str | None = key(
        None,
        "frozen_base, in the script form; set from compute_type.",
        choices=("weight_only_mix", "weight_only_int8", "weight_only_int4", "nf4", "fp8linear"),
    )
    apply_hadamard: bool = key(
        False,
        "compute_type fp8: rotate the inputs and weights of linears in blocks before they are rounded, never those of "
        "experts. Only servers that rotate, too, can use the exported weights.",
        fixed=True,
    )
    hadamard_block_size: int = key(32, "Block size of the rotation; a power of two.", low=2, fixed=True)
    quant_input_grad: bool = key(False, "compute_type fp8: also quantise gradients with respect to inputs.", fixed=True)
    quant_weight_grad: bool = key(False, "compute_type fp8: quantise the operands of weight gradients.", fixed=True)
    apply_online_actscale_step: int = key(
        200, "Steps after which activation scales follow a moving average instead of each step.", low=0, fixed=True
    )
    actscale_moving_rate: float = key(
        0.01, "Weight of each further step in that moving average.", low=0, high=1, fixed=True
    )
    fp8_format_type: str = key(
        "hybrid",
        "Formats: hybrid has e5m2 for gradients that are rounded; weights and activations are e4m3.",
        choices=("hybrid", "e4m3"),
        fixed=True,
    )
    use_fp8: bool = key(
        False,
        "Products of layers in block-wise fp8 (1 x 128 of activations, 128 x 128 of weights); for pre-training. "
        "Experimental: the numbers of fp8 at the speed of compute_type.",
        fixed=True,
    )
    fp8_force_clear_state: bool = key(False, "Reset activation scales when resuming.")
    enable_fp8_quantize_analysis: bool = key(
        False, "Log how many layers clipped inputs (fp8_clipped), and how far the worst was over its scale (fp8_worst)."
    )
