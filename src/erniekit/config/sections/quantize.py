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
            word: f"erniekit export format=gguf gguf_type={word}" for word in GGUF_TYPES if word not in QUANT_RECIPES
        },
        basic=True,
    )
    quant_method: str | None = key(
        None,
        "gptq carries rounding errors on; rtn rounds to nearest. gptq needs rows (train_dataset_path), and is taken "
        "where they are given.",
        also=("method",),
        choices=("gptq", "rtn"),
    )
    quant_group_size: int | None = key(
        None,
        "Numbers of a row that share a scale (w4a16, w8a16, w4w8a16): 32, 64, 128, or -1 for whole rows. The largest "
        "that fits when not given; w8a16 has whole rows then.",
        also=("group_size",),
        low=-1,
    )
    calibration_rows: int = key(128, "Rows of train_dataset_path it is calibrated on; drawn by seed.", low=1)
    expert_tokens: int = key(
        256, "Tokens each expert is calibrated on at least; others than routed ones fill up what is missing.", low=1
    )
