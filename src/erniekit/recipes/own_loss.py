"""A loss of the user's own in a run: the function `token_loss` names or a Python session gives, put into the model.

Called by recipes/__init__.py (stage_of), build.py and evaluate.py; losses/own.py computes it.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.loss_table import IN_SESSION, TOKEN_LOSSES
from erniekit.losses.own import OwnLossHead, TokenLoss
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local

if TYPE_CHECKING:
    from erniekit.recipes.stage import TrainingStage

STAGES = ("SFT", "PT")


def find_loss(cfg: RunConfig) -> TokenLoss:
    """Of an installed package, by the key."""
    name = cfg.train.token_loss
    if name.startswith(IN_SESSION):
        raise ConfigError(
            f"the loss {name.removeprefix(IN_SESSION)} is a function of a Python session, which is not at hand",
            where=cfg.origin("token_loss"),
            fix="erniekit.train(..., loss=FUNCTION), or leave token_loss out",
        )
    return TokenLoss.of(TOKEN_LOSSES.get(name), f"{name} of {TOKEN_LOSSES.distribution(name)}")


def with_loss(stage: TrainingStage, cfg: RunConfig, loss: TokenLoss) -> TrainingStage:
    """The stage with another loss; refused where it would not be what the run trains on."""
    if cfg.train.stage not in STAGES:
        other = "; loss_type takes preference losses of packages" if cfg.train.stage == "DPO" else ""
        fix = f"stage: {' or '.join(STAGES)}{other}"
        raise _refused(cfg, f"stage: {cfg.train.stage} has a loss of its own", fix)
    if cfg.model.num_nextn_predict_layers > 0 and cfg.model.multi_token_pred_lambda > 0:
        raise _refused(cfg, "layers that predict further tokens have a loss of their own", "multi_token_pred_lambda: 0")
    out = copy(stage)
    out.own_loss, out.perplexity = loss, False
    return out


def install(loss: TokenLoss | None, engine: Engine, cfg: RunConfig) -> None:
    """Into the parts of the model that have a head."""
    if loss is None:
        return
    tensor_parallel = engine.world.layout.tp
    if loss.needs_logits and tensor_parallel > 1:
        what = f"the loss {loss.name} takes logits, which tensor_parallel_degree: {tensor_parallel} never joins"
        raise _refused(cfg, what, "a loss of logprobs, or tensor_parallel_degree: 1")
    parts: list[Any] = list(engine.parts)
    for part in parts:
        if part.last:
            part.output = OwnLossHead(part.output, loss)


def failed_in(engine: Engine) -> str:
    """The name of an own loss that gave nan or inf since the last call; empty: none did, or some weight is not
    finite itself. All ranks call it, after a step that gave such numbers."""
    parts: list[Any] = list(engine.parts)
    heads = [part.output for part in parts if isinstance(part.output, OwnLossHead)]
    found = [head.own.name for head in heads if head.failed()]
    sound = all(bool(local(p.detach()).isfinite().all()) for part in parts for p in part.parameters())
    gathered: list[tuple[list[str], bool]] = engine.world.gather((found, sound))
    names = [name for names_there, _ in gathered for name in names_there]
    return names[0] if names and all(sound for _, sound in gathered) else ""


def _refused(cfg: RunConfig, why: str, fix: str) -> ConfigError:
    given = cfg.train.token_loss.startswith(IN_SESSION)
    where = "loss" if given else f"token_loss: {cfg.origin('token_loss')}"
    return ConfigError(f"an own loss cannot be used here: {why}", where=where, fix=fix)
