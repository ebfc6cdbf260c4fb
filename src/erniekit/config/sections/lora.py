"""Whether adapters are trained instead of the weights, and their shape. Read by the recipes, export and chat."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key
from erniekit.lora_scale import DERIVED_ALPHA
from erniekit.weight_kinds import BASES, BF16, WEIGHT_KINDS


@dataclass(frozen=True)
class LoraSection:
    fine_tuning: str = key(
        "LoRA", "Train adapters (LoRA) or every weight (Full).", choices=("LoRA", "Full"), basic=True, fixed=True
    )
    lora: bool = key(False, "fine_tuning: LoRA, in the script form; set from fine_tuning.")
    lora_rank: int = key(8, "LoRA rank; 32 in the recipes.", low=1, basic=True, fixed=True)
    lora_alpha: int = key(DERIVED_ALPHA, "LoRA alpha; -1 = 2 x rank, or 4 with rslora.", low=-1, basic=True, fixed=True)
    lora_target_modules: tuple[str, ...] = key(
        (), "Names of the linear layers to adapt; default: all of attention and MLP.", fixed=True
    )
    rslora: bool = key(False, "Scale by alpha/sqrt(rank) instead of alpha/rank.", fixed=True)
    lora_plus_scale: float = key(1.0, "LoRA+: learning rate of B as a multiple of A's.", low=0, fixed=True)
    rslora_plus: bool = key(False, "rslora with lora_plus_scale 4 and lora_alpha 4.", fixed=True)
    use_dora: bool = key(
        False, "DoRA: also train the magnitude of each adapted row. On linear layers, without tensor parallelism.",
        fixed=True,
    )  # fmt: skip
    lora_init: str = key(
        "default",
        "default = B is zero; pissa = A and B start as the largest singular directions of each weight; saved as plain "
        "LoRA of twice the rank.",
        choices=("default", "pissa"),
        fixed=True,
    )
    pissa_iterations: int = key(
        0, "Steps of a randomised decomposition for lora_init: pissa, quicker for large weights; 0 is exact.", low=0,
        fixed=True,
    )  # fmt: skip
    frozen_base: str = key(
        BF16,
        "Frozen weights of adapted layers: bf16 keeps them in compute_type; the others pack them into 8 or 4 bits as "
        "they are read (docs/compression.md has their errors). wint4/8: routed experts int4, attention and dense "
        "feed-forward int8, shared experts bf16. Adapters stay in bf16.",
        choices=BASES,
        further=WEIGHT_KINDS,
        elsewhere={"wint8": "int8, which is what compute_type: wint8 means"}.get,
        fixed=True,
    )
    frozen_products: str = key(
        BF16,
        "Products with packed frozen weights: bf16 of the unpacked numbers, or fp8 where those are exact in it (int4, "
        "mxfp4): faster on Hopper cards, and rows of activations are rounded, 2.6 % of a product.",
        choices=(BF16, "fp8"),
        fixed=True,
    )
    lora_path: tuple[str, ...] = key(
        (),
        "Adapters to start from, to open or to merge (erniekit's, PEFT's or Paddle's); export takes several: A,B.",
        commas=True,
        path="several",
    )
    override_base: bool = key(False, "Use an adapter on a base model it was not trained on.")

    @property
    def packed_base(self) -> bool:
        """Frozen weights are kept as another kind than they are computed in."""
        return self.lora and self.frozen_base != BF16
