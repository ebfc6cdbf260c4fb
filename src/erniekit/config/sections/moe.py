"""Mixture-of-experts models. Declared for the recipes that carry it; dense models pass over every key here."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key

_MOE = "mixture of experts"


@dataclass(frozen=True)
class MoeSection:
    moe_group: str = key(
        "dummy",
        "Devices the experts are spread over.",
        choices=("dummy", "mp", "tp", "model", "data", "dp", "ep", "world", "all", "none"),
        later=_MOE,
    )
    moe_multimodal_dispatch_use_allgather: str = key(
        "v2-alltoall-unpad", "How tokens travel to experts; empty is the classic all-to-all.", later=_MOE
    )
    moe_gate: str = key("top2_fused", "Router.", later=_MOE)
    moe_aux_loss_lambda: float = key(1e-5, "Weight of the balance loss.", low=0, fixed=True, later=_MOE)
    moe_orthogonal_loss_lambda: float = key(
        0.0, "Weight of the router's orthogonal loss.", low=0, fixed=True, later=_MOE
    )
    moe_z_loss_lambda: float = key(0.0, "Weight of the router's z-loss.", low=0, fixed=True, later=_MOE)
    moe_use_aux_free: bool | None = key(
        None, "Balance by a bias on the router; the model's own choice when not given.", fixed=True, later=_MOE
    )
    moe_use_aux_free_update_coef: float = key(1e-3, "Step of that bias.", low=0, fixed=True, later=_MOE)
    moe_use_hard_gate: bool = key(False, "Route text and images to experts of their own.", fixed=True, later=_MOE)
    moe_group_experts: bool = key(False, "Choose experts within groups.", fixed=True, later=_MOE)
    moe_gate_lr_ratio: float | None = key(
        None, "Learning rate of the router as a share.", low=0, fixed=True, later=_MOE
    )
    moe_dropout_prob: float = key(0.0, "Dropout inside experts.", low=0, high=1, fixed=True, later=_MOE)
    moe_with_send_router_loss: bool = key(False, "Carry router losses along the pipeline.", later=_MOE)
    use_moe: bool = key(False, "Says that the model has experts.", later=_MOE)
    use_recompute_moe: bool = key(False, "Recompute experts in the backward pass.", later=_MOE)
    use_ortho_loss_callback: bool = key(False, "Apply the orthogonal loss once a step.", fixed=True, later=_MOE)
    train_moe_only: int | None = key(None, "Train the experts alone.", fixed=True, later="partial training")
    expert_max_capacity: int = key(2**32, "Most tokens per expert.", low=1, fixed=True, later=_MOE)
    expert_min_capacity: int = key(1, "Fewest tokens per expert.", low=0, fixed=True, later=_MOE)
