"""Mixture-of-experts models. Read by recipes/expert_layers.py; dense models pass over every key here."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.field import key


@dataclass(frozen=True)
class MoeSection:
    moe_group: str = key(
        "dummy",
        "Devices whole experts are dealt to: mp (tp, model) the tensor-parallel ones; ep (data, dp) those that read "
        "different data, expert_parallel_degree of them; world (all) both. dummy (none) deals out none.",
        choices=("dummy", "mp", "tp", "model", "data", "dp", "ep", "world", "all", "none"),
    )
    moe_multimodal_dispatch_use_allgather: str = key(
        "v2-alltoall-unpad",
        "How tokens reach experts on other devices: empty or with the word alltoall each goes only where its experts "
        "are; any other word gathers all tokens everywhere.",
    )
    moe_aux_loss_lambda: float = key(
        1e-5, "Weight of the loss that evens out the experts' use; never in the reported loss.", low=0, fixed=True
    )
    moe_orthogonal_loss_lambda: float = key(
        0.0, "Weight of the loss that keeps the router's directions apart.", low=0, fixed=True
    )
    moe_z_loss_lambda: float = key(0.0, "Weight of the loss that keeps the router's logits small.", low=0, fixed=True)
    moe_vision_aux_loss_lambda: float | None = key(
        None, "moe_aux_loss_lambda of vision experts; the same as of text when not given.", low=0, fixed=True
    )
    moe_vision_orthogonal_loss_lambda: float | None = key(
        None, "moe_orthogonal_loss_lambda of vision experts; the same as of text when not given.", low=0, fixed=True
    )
    moe_vision_z_loss_lambda: float | None = key(
        None, "moe_z_loss_lambda of vision experts; the same as of text when not given.", low=0, fixed=True
    )
    moe_use_aux_free: bool | None = key(
        None,
        "Choose experts with the bias that evens out their use; the model's own way when not given. False routes "
        "otherwise than the model was released.",
        fixed=True,
    )
    moe_use_aux_free_update_coef: float = key(
        1e-3,
        "How far that bias moves after each step: in pre-training, in full fine-tuning where it is given, never with "
        "LoRA.",
        low=0,
        fixed=True,
    )
    moe_use_hard_gate: bool = key(False, "Route text and images to experts of their own.", fixed=True, later="vision")
    moe_group_experts: bool = key(False, "Choose experts within groups.", fixed=True, later="grouped experts")
    moe_gate_lr_ratio: float | None = key(
        None, "Learning rate of the router as a share of the others'.", low=0, fixed=True
    )
    moe_dropout_prob: float = key(0.0, "Dropout inside experts.", low=0, high=1, fixed=True, later="dropout")
    use_recompute_moe: bool = key(
        False, "Compute experts again in the backward pass; recompute: True with full granularity does it anyway."
    )
    train_moe_only: int | None = key(None, "Train the experts alone.", fixed=True, later="partial training")
    expert_max_capacity: int = key(
        2**32, "Most tokens an expert takes of a micro-batch; the others go without it.", low=1, fixed=True
    )
    expert_min_capacity: int = key(
        1, "Fewest it has room for, where the model's config.json limits experts (moe_capacity).", low=0, fixed=True
    )
