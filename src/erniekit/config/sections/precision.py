"""Number formats of the computation. Read by the recipes; quantised formats are in quant."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.weight_kinds import BASES


@dataclass(frozen=True)
class PrecisionSection:
    compute_type: str = key(
        "bf16",
        "bf16 with fp32 master weights, or fp32; fp8 trains for FP8 serving; wint8, wint4/8 and nf4 are bf16 over such "
        "a frozen_base (LoRA).",
        choices=("bf16", "fp32", "fp16", "fp8", "wint8", "wint4/8", "nf4"),
        elsewhere={base: f"frozen_base: {base}, with compute_type: bf16" for base in BASES}.get,
        basic=True,
        fixed=True,
    )
    bf16: bool = key(False, "compute_type: bf16, in the script form; set from compute_type.")
    fp16: bool = key(False, "compute_type: fp16, in the script form; set from compute_type.")
    scale_loss: float = key(32768.0, "First loss scale of fp16.", low=0, not_yet="fp16")
