"""Quantising a finished model. Read by `erniekit quantize`, and by `erniekit export` where `quant` is given."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.config.sections.export import GGUF_TYPES
from erniekit.quant_schemes import QUANT_RECIPES


@dataclass(frozen=True)
class QuantizeSection:
    quant: str | None = key(
        None,
        "Number format of the result. " + "; ".join(f"{name}: {r.about}" for name, r in QUANT_RECIPES.items()) + ".",
        choices=tuple(QUANT_RECIPES),
        elsewhere={
            kind: f"erniekit export format=gguf gguf_type={kind}" for kind in GGUF_TYPES if kind not in QUANT_RECIPES
        }.get,
        basic=True,
    )
    quant_method: str | None = key(
        None,
        "gptq compensates rounding errors; rtn rounds to nearest. gptq needs calibration rows (train_dataset_path) and "
        "is the default if they are given.",
        also=("method",),
        choices=("gptq", "rtn"),
    )
    quant_group_size: int | None = key(
        None,
        "Group size of scales (w4a16, w8a16, w4w8a16): 32, 64, 128, or -1 for whole rows. Default: the largest that "
        "fits; whole rows for w8a16.",
        also=("group_size",),
        low=-1,
    )
    calibration_rows: int = key(128, "Calibration rows, sampled from train_dataset_path by seed.", low=1)
    expert_tokens: int = key(
        256, "Minimum calibration tokens per expert; filled up with tokens that were not routed to it.", low=1
    )
