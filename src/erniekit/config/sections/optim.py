"""Optimiser and learning-rate schedule. Read by the recipes, which pass numbers to optim/."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class OptimSection:
    learning_rate: float = key(
        5e-5, "Peak learning rate; about 1e-5 for Full, 3e-4 for LoRA.", example="3e-4", low=0, basic=True, fixed=True
    )
    lr_scheduler_type: str = key(
        "linear",
        "Schedule: linear, cosine, constant, polynomial, wsd.",
        choices=("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "wsd"),
        basic=True,
        fixed=True,
    )
    min_lr: float = key(
        0.0, "Final learning rate of cosine and wsd.", also=("min_learning_rate",), low=0, basic=True, fixed=True
    )
    warmup_steps: int = key(0, "Warm-up steps; well under max_steps.", low=0, basic=True, fixed=True)
    warmup_ratio: float = key(
        0.0, "Warm-up as a share of the run; warmup_steps takes precedence.", low=0, high=1, fixed=True
    )
    weight_decay: float = key(0.0, "Decoupled weight decay; never on biases and norms.", low=0, basic=True, fixed=True)
    max_grad_norm: float = key(1.0, "Clip the global gradient norm to this; 0 = off.", fixed=True)
    adam_beta1: float = key(0.9, "Decay of AdamW's first moment.", low=0, high=1, fixed=True)
    adam_beta2: float = key(0.999, "Decay of AdamW's second moment; 0.95 is usual for LLMs.", low=0, high=1, fixed=True)
    adam_epsilon: float = key(1e-8, "AdamW's epsilon, added to the denominator.", low=0, fixed=True)
    layerwise_lr_decay_bound: float = key(
        1.0,
        "Learning rate of the lowest layer as a share of the top one's; 1 = the same for all.",
        low=0,
        high=1,
        fixed=True,
    )
    lr_scheduler: str | None = key(
        None, "Old second name of lr_scheduler_type; wsd:N holds the rate for N steps.", fixed=True
    )
    decay_function: str = key("half_life", "How wsd decays.", choices=("half_life", "1-sqrt"), fixed=True)
    decay_steps: int | None = key(None, "Steps the schedule spans; default: max_steps.", low=1, fixed=True)
    num_cycles: float = key(0.5, "Cosine cycles in the run; 0.5 decays once.", low=0, fixed=True)
    lr_end: float = key(1e-7, "Final learning rate of polynomial.", low=0, fixed=True)
    power: float = key(1.0, "Exponent of polynomial.", low=0, fixed=True)
    optim: str = key(
        "adamw",
        "Optimiser: adamw; muon = orthogonalised updates for the matrices inside the layers, AdamW for the rest; "
        "adamw_custom = ERNIEKit's name for adamw with optim_states: bf16 in host memory.",
        choices=("adamw", "muon", "adafactor", "adamw_mini", "adamw_custom"),
        fixed=True,
    )
    muon_momentum: float = key(0.95, "Momentum of optim: muon.", low=0, high=1, fixed=True)
    muon_learning_rate: float | None = key(
        None, "Peak learning rate of Muon's matrices; default: learning_rate.", low=0, fixed=True
    )
    muon_scale: str = key(
        "match_adamw",
        "Size of Muon's updates: match_adamw makes them as large as AdamW's, so that one learning_rate serves both; "
        "original is sqrt(max(1, rows / columns)), with a muon_learning_rate of about 0.02.",
        choices=("match_adamw", "original"),
        fixed=True,
    )
    optim_states: str = key(
        "fp32",
        "AdamW's moments: fp32 (8 bytes a trained weight), bf16 (4) or 8bit (2, in blocks of 256); rounded without "
        "bias.",
        choices=("fp32", "bf16", "8bit"),
        fixed=True,
    )
    use_lowprecision_moment: bool = key(False, "ERNIEKit's name for optim_states: bf16.", fixed=True)
    master_weights: str = key(
        "fp32",
        "Master copy of 16-bit weights: fp32 (4 bytes per weight), exact16 (2 bytes: the 16 bits missing from the "
        "weight, lossless) or none (0 bytes: the weight itself is updated with stochastic rounding).",
        choices=("fp32", "exact16", "none"),
        fixed=True,
    )
    update_in_backward: bool = key(
        False,
        "Update each weight as soon as its gradient is complete, then free the gradient: saves 2 bytes per weight. One "
        "device, gradient_accumulation_steps 1; grad_clip sets how gradients are clipped.",
        fixed=True,
    )
    grad_clip: str = key(
        "global",
        "Which norm max_grad_norm limits: that of the whole gradient; with update_in_backward, where it is known too "
        "late, the one of the previous step, or each tensor's own.",
        choices=("global", "previous", "tensor"),
        fixed=True,
    )
