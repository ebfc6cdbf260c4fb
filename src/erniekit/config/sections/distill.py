"""Learning from a teacher's probabilities, in stage SFT. Read by recipes/distillation.py."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class DistillSection:
    teacher_model_name_or_path: str | None = key(
        None,
        "SFT: a model folder or hub id whose probabilities over the whole vocabulary are learnt in addition to the "
        "data; it must have the same vocabulary.",
        path="model",
        fixed=True,
    )
    distill_alpha: float = key(
        0.5, "Weight of the KL divergence; the cross-entropy of the data has the rest.", low=0, high=1, fixed=True
    )
    distill_temperature: float = key(
        1.0, "Both models' logits are divided by this in the KL divergence.", low=0.01, fixed=True
    )
    distill_kl: str = key(
        "forward",
        "forward: KL(teacher, student), covers everything the teacher finds likely; reverse: KL(student, teacher), "
        "concentrates on what the teacher is sure of.",
        choices=("forward", "reverse"),
        fixed=True,
    )
