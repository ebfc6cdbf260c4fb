"""Mixture-of-experts models. Read by recipes/expert_layers.py; dense models pass over every key here."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class MoeSection:
    moe_group: str = key(
        "dummy",
        "Devices that hold whole experts: mp (tp, model) the tensor-parallel ones; ep (data, dp) those that read "
        "different data, expert_parallel_degree of them; world (all) both. dummy (none) distributes none.",
        choices=("dummy", "mp", "tp", "model", "data", "dp", "ep", "world", "all", "none"),
    )
    moe_multimodal_dispatch_use_allgather: str = key(
        "v2-alltoall-unpad",
        "Dispatch of tokens to experts on other devices: empty or containing alltoall = only to the devices of their "
        "experts; anything else = all tokens to all devices.",
    )
    moe_aux_loss_lambda: float = key(
        1e-5, "Weight of the load-balancing loss; not part of the reported loss.", low=0, fixed=True
    )
    moe_orthogonal_loss_lambda: float = key(0.0, "Weight of the router's orthogonality loss.", low=0, fixed=True)
    moe_z_loss_lambda: float = key(0.0, "Weight of the router's z-loss.", low=0, fixed=True)
    moe_vision_aux_loss_lambda: float | None = key(
        None, "moe_aux_loss_lambda of vision experts; default: as for text.", low=0, fixed=True
    )
    moe_vision_orthogonal_loss_lambda: float | None = key(
        None, "moe_orthogonal_loss_lambda of vision experts; default: as for text.", low=0, fixed=True
    )
    moe_vision_z_loss_lambda: float | None = key(
        None, "moe_z_loss_lambda of vision experts; default: as for text.", low=0, fixed=True
    )
    moe_use_aux_free: bool | None = key(
        None,
        "Route with the load-balancing bias (auxiliary-loss-free); default: as the model was released. False routes "
        "differently from the released model.",
        fixed=True,
    )
    moe_use_aux_free_update_coef: float = key(
        1e-3,
        "Step size of that bias: in pre-training, in full fine-tuning if given, never with LoRA.",
        low=0,
        fixed=True,
    )
    moe_use_hard_gate: bool = key(False, "Route text and images to separate experts.", fixed=True, not_yet="vision")
    moe_group_experts: bool = key(False, "Choose experts within groups.", fixed=True, not_yet="grouped experts")
    moe_gate_lr_ratio: float | None = key(
        None, "Learning rate of the router as a share of the others'.", low=0, fixed=True
    )
    moe_dropout_prob: float = key(0.0, "Dropout inside experts.", low=0, high=1, fixed=True, not_yet="dropout")
    use_recompute_moe: bool = key(
        False, "Recompute experts in the backward pass; recompute: True with full granularity includes it."
    )
    train_moe_only: int | None = key(None, "Train only the experts.", fixed=True, not_yet="partial training")
    expert_max_capacity: int = key(
        2**32, "Maximum tokens per expert and micro-batch; further ones are dropped by that expert.", low=1, fixed=True
    )
    expert_min_capacity: int = key(
        1, "Minimum capacity of an expert, if the model's config.json limits it (moe_capacity).", low=0, fixed=True
    )
