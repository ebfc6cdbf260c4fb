"""Which weights a full run trains, and noise on embeddings. Read by recipes/trained_weights.py and datasets.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class TuningSection:
    train_only: tuple[str, ...] = key(
        (),
        "Train only the weights whose names match one of these comma-separated glob patterns: model.layers.1, "
        "*.mlp.*, mtp. Names are those of the Hugging Face layout, or erniekit's.",
        commas=True,
        fixed=True,
    )
    freeze: tuple[str, ...] = key(
        (), "Do not train the weights whose names match one of these comma-separated glob patterns.", commas=True,
        fixed=True,
    )  # fmt: skip
    neftune_noise_alpha: float = key(
        0.0,
        "NEFTune: uniform noise on the embeddings of each training row, at most alpha / sqrt(length x hidden size); "
        "5 is common, 0 = off.",
        low=0,
        fixed=True,
    )

    neftune: bool | None = key(
        None, "PaddleFormers' switch for neftune_noise_alpha: True takes 5 where none is given, False turns it off.",
        fixed=True,
    )  # fmt: skip

    @property
    def partial(self) -> bool:
        """Patterns decide which weights are trained."""
        return bool(self.train_only or self.freeze)
