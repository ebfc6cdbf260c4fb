"""A loss of the user's own in a run: the function `token_loss` or `loss_type` names, or a Python session gives.

Called by recipes/__init__.py (stage_of), build.py and evaluate.py. losses/own.py computes a token loss, inside the
model; losses/own_preference.py a preference loss, which recipes/dpo.py passes on.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from erniekit.config import RunConfig
from erniekit.errors import ConfigError
from erniekit.loss_table import IN_SESSION, TOKEN_LOSSES
from erniekit.losses.own import OwnLossHead, TokenLoss
from erniekit.losses.own_preference import PairLoss
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local

if TYPE_CHECKING:
    from erniekit.recipes.stage import TrainingStage

OwnLoss = TokenLoss | PairLoss
STAGES = ("SFT", "PT")  # of token losses
PREFERENCE_STAGE = "DPO"
# What other stages have in its place.
_FIXED = {
    "DPO": "a loss of pairs, which token_loss does not name",
    "KTO": "one loss, against a baseline measured on other rows of the batch",
    "RM": "a loss of the scores of its head, not of tokens",
    "CLS": "a loss of the scores of its head, not of tokens",
}


def loss_key(cfg: RunConfig) -> str:
    """The key that names an own loss in this stage."""
    return "loss_type" if cfg.train.stage == PREFERENCE_STAGE and not cfg.given("token_loss") else "token_loss"


def session_loss(cfg: RunConfig, function: Any) -> OwnLoss:
    """A function that a Python session gives, by what its stage asks of one."""
    if cfg.train.stage not in (*STAGES, PREFERENCE_STAGE):
        raise _not_in_stage(cfg, "loss")
    made = function if hasattr(function, "__qualname__") else type(function)
    name = f"{made.__module__}.{made.__qualname__}"
    return (PairLoss if cfg.train.stage == PREFERENCE_STAGE else TokenLoss).of(function, name)


def find_loss(cfg: RunConfig) -> OwnLoss:
    """Of an installed package, by the key."""
    key = loss_key(cfg)
    name = cfg[key]
    if name.startswith(IN_SESSION):
        raise ConfigError(
            f"the loss {name.removeprefix(IN_SESSION)} is a function of a Python session, which is not at hand",
            where=cfg.origin(key),
            fix=f"erniekit.train(..., loss=FUNCTION), or leave {key} out",
        )
    if key == "loss_type":
        return PairLoss.of_package(name)
    return TokenLoss.of(TOKEN_LOSSES.get(name), f"{name} of {TOKEN_LOSSES.distribution(name)}")


def with_loss(stage: TrainingStage, cfg: RunConfig, loss: OwnLoss) -> TrainingStage:
    """The stage with another loss; refused where it would not be what the run trains on."""
    if isinstance(loss, PairLoss):
        out = copy(stage)
        out.own_loss = loss
        return out
    if cfg.train.stage not in STAGES:
        raise _not_in_stage(cfg, _where(cfg))
    if cfg.model.num_nextn_predict_layers > 0 and cfg.model.multi_token_pred_lambda > 0:
        raise _refused(cfg, "layers that predict further tokens have a loss of their own", "multi_token_pred_lambda: 0")
    out = copy(stage)
    out.own_loss, out.perplexity = loss, False
    return out


def install(loss: OwnLoss | None, engine: Engine, cfg: RunConfig) -> None:
    """A token loss: into the parts of the model that have a head."""
    if not isinstance(loss, TokenLoss):
        return
    tensor_parallel = engine.world.layout.tp
    if loss.needs_logits and tensor_parallel > 1:
        what = f"the loss {loss.name} takes logits, which tensor_parallel_degree: {tensor_parallel} never joins"
        raise _refused(cfg, what, "a loss of logprobs, or tensor_parallel_degree: 1")
    parts: list[Any] = list(engine.parts)
    for part in parts:
        if part.last:
            part.output = OwnLossHead(part.output, loss)


def failed_in(engine: Engine, loss: OwnLoss | None) -> str:
    """The name of an own loss that gave nan or inf since this was last asked; empty: none did, or some weight is not
    finite itself. loss: the stage's. All ranks call it, after a step that gave such numbers."""
    parts: list[Any] = list(engine.parts)
    heads = [part.output for part in parts if isinstance(part.output, OwnLossHead)]
    found = [head.own.name for head in heads if head.watch.failed()]
    if isinstance(loss, PairLoss) and loss.watch.failed():
        found.append(loss.name)
    sound = all(bool(local(p.detach()).isfinite().all()) for part in parts for p in part.parameters())
    told: list[tuple[list[str], bool]] = engine.world.gather((found, sound))
    names = [name for mine, _ in told for name in mine]
    return names[0] if names and all(sound for _, sound in told) else ""


def _not_in_stage(cfg: RunConfig, where: str) -> ConfigError:
    stage = cfg.train.stage
    tokens, pairs = " or ".join(STAGES), PREFERENCE_STAGE
    fix = f"stage: {tokens} takes a loss of tokens (token_loss), stage: {pairs} one of pairs (loss_type)"
    why = f"stage: {stage} has {_FIXED.get(stage, 'a loss of its own')}"
    return ConfigError(f"an own loss cannot be used here: {why}", where=where, fix=fix)


def _refused(cfg: RunConfig, why: str, fix: str) -> ConfigError:
    return ConfigError(f"an own loss cannot be used here: {why}", where=_where(cfg), fix=fix)


def _where(cfg: RunConfig) -> str:
    given = cfg.train.token_loss.startswith(IN_SESSION)
    return "loss" if given else f"token_loss: {cfg.origin('token_loss')}"
