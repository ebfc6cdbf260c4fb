"""LoRASettings: rank, scale and targets, after the rules of config/rules/stages.py. Plain numbers, no torch.

Made by recipes/adapters.py from the lora section, and from an adapter's own config when one is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from erniekit.errors import ConfigError
from erniekit.lora_scale import default_alpha, scale_of


@dataclass(frozen=True)
class LoRASettings:
    rank: int = 8
    alpha: float = 16
    rslora: bool = False
    lora_plus_scale: float = 1.0  # learning rate of B as a multiple of A's
    targets: tuple[str, ...] | None = None  # public names or regexes; None: all the family's projections
    shared_a: bool = False  # one A for all parts of a fused linear, as ERNIEKit trains
    dora: bool = False  # each row has a trained length as well
    pissa: bool = False  # A and B begin as the principal part of the weight, which is taken off it

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora_rank is {self.rank}", where="lora_rank", fix="use 1 or more; 8 is common")
        if self.alpha <= 0:
            raise ConfigError(
                f"lora_alpha is {self.alpha}", where="lora_alpha", fix="use a positive number, or -1 for 2 x rank"
            )

    @property
    def scaling(self) -> float:
        return scale_of(self.alpha, self.rank, self.rslora)

    @classmethod
    def resolve(
        cls,
        rank: int = 8,
        alpha: float | None = None,
        *,
        rslora: bool = False,
        lora_plus_scale: float = 1.0,
        targets: Sequence[str] | None = None,
        shared_a: bool = False,
        dora: bool = False,
        pissa: bool = False,
    ) -> LoRASettings:
        """alpha None: the default of this rank."""
        if alpha is None:
            alpha, _ = default_alpha(rank, rslora)
        return cls(rank, alpha, rslora, lora_plus_scale, tuple(targets) if targets else None, shared_a, dora, pissa)
