"""What the keys of experts and of layers that predict further tokens (MTP) make of a model's config.

Called by run_plan.py (`as_built`, `mtp_tokens`), build.py and expert_layers.py.
"""

from __future__ import annotations

from copy import copy
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.loss_table import PREFERENCE_KEYS
from erniekit.losses.moe_balance import RouterLossWeights
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.modal import OF_VISION
from erniekit.printable import counted

if TYPE_CHECKING:
    from erniekit.checkpoint.model_folder import ModelFolder

SCORING = ("DPO", *PREFERENCE_KEYS)  # stages that score answers and train no layer that predicts further tokens
BIAS = "e_score_correction_bias"
IGNORED = (
    "moe_use_aux_free: False: routing ignores the bias this model was released with, so other experts are chosen than "
    "where it is served"
)


def as_built(folder: ModelFolder, cfg: RunConfig) -> tuple[ModelFolder, tuple[str, ...]]:
    """The folder with its config as this run builds it, and what the user should know of that."""
    folder = copy(folder)
    folder.config = replace(folder.config, mtp_layers=_mtp_layers(cfg, folder))
    notes: tuple[str, ...] = ()
    moe = folder.config.moe
    if moe is None:
        return folder, notes
    most = None if cfg.moe.expert_max_capacity >= 2**32 else cfg.moe.expert_max_capacity
    moe = replace(moe, fewest=cfg.moe.expert_min_capacity, most=most)
    if cfg.moe.moe_use_aux_free is False and moe.bias:
        if cfg.compat.unused_router_bias_is_dropped:
            notes = (f"{IGNORED}; saved models lack it (compat: erniekit)",)
            moe = replace(moe, bias=False)
            folder.files = {name: file for name, file in folder.files.items() if not name.endswith(BIAS)}
        else:
            notes = (f"{IGNORED}; saved models keep it, and config.json says that it is off",)
        moe = replace(moe, biased=False)
    folder.config = replace(folder.config, moe=moe)
    return folder, notes


def _mtp_layers(cfg: RunConfig, folder: ModelFolder) -> int:
    wanted, held = cfg.model.num_nextn_predict_layers, folder.config.mtp_layers
    if wanted and cfg.train.stage in SCORING:
        raise ConfigError(
            "preference training scores answers; it does not train layers that predict further tokens",
            where="num_nextn_predict_layers",
            fix="leave it out: those layers are kept as they are",
        )
    from_nothing = not cfg.model.continue_training and folder.config.moe is not None
    if from_nothing and cfg.given("num_nextn_predict_layers"):
        return wanted
    if wanted and wanted != held:
        has = counted(held, "layer that predicts", "layers that predict") if held else "no layers that predict"
        raise ConfigError(
            f"num_nextn_predict_layers is {wanted}, this model has {has} further tokens",
            where=f"num_nextn_predict_layers, {folder.path}",
            fix=f"set it to {held} to train those" + (", or 0 to leave them as they are" if held else ""),
        )
    return held


def mtp_tokens(cfg: RunConfig, config: DecoderConfig) -> int:
    """How many further tokens are trained: all the model's layers for them, or none."""
    wanted = cfg.model.num_nextn_predict_layers
    if not cfg.model.continue_training and not cfg.given("num_nextn_predict_layers") and cfg.train.stage not in SCORING:
        wanted = config.mtp_layers  # they have not been trained before
    return wanted if cfg.model.multi_token_pred_lambda else 0


def weights_of(cfg: RunConfig, vision: bool = False) -> RouterLossWeights:
    """Of the only bank or that of text, or of the vision bank, whose own keys come first."""
    m = cfg.moe
    text = RouterLossWeights(m.moe_aux_loss_lambda, m.moe_z_loss_lambda, m.moe_orthogonal_loss_lambda)
    own = (m.moe_vision_aux_loss_lambda, m.moe_vision_z_loss_lambda, m.moe_vision_orthogonal_loss_lambda)
    if not vision:
        return text
    return RouterLossWeights(*(as_text if value is None else value for value, as_text in zip(own, astuple(text))))


def metric_names(cfg: RunConfig, config: DecoderConfig) -> tuple[str, ...]:
    """What these layers add to a step's numbers."""
    routers = weights_of(cfg).metric_names() if config.moe is not None else ()
    if config.moe is not None and config.moe.vision is not None:
        routers += tuple(name + OF_VISION for name in weights_of(cfg, vision=True).metric_names())
    return (*routers, "mtp_loss") if mtp_tokens(cfg, config) else routers


def bias_step(cfg: RunConfig, config: DecoderConfig) -> float:
    """How far the bias moves in a step. Adapters are saved without it, so with LoRA it stays; in fine-tuning, whose
    data need not be even over the experts, it moves only on request. ERNIEKit moves it in pre-training."""
    assert config.moe is not None
    if cfg.lora.lora or not (config.moe.bias and config.moe.biased):
        return 0.0
    wanted = cfg.given("moe_use_aux_free_update_coef") and not cfg.compat.router_bias_moves_in_pretraining_only
    return cfg.moe.moe_use_aux_free_update_coef if wanted or cfg.train.stage == "PT" else 0.0
