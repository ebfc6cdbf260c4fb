"""A teacher for SFT: opened with the student, compared with it before the start, and whole on every rank.

Called by recipes/sft.py where teacher_model_name_or_path is given.
"""

from __future__ import annotations

from torch import nn

from erniekit.api_load import Found, find_model
from erniekit.config import RunConfig
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.kernels.distillation import Mix
from erniekit.log import emit
from erniekit.losses.distillation import DistillationLoss, DistillingHead, KeptHidden
from erniekit.models import costs
from erniekit.models.score_head import refuse as refuse_score_head
from erniekit.recipes.built import Built
from erniekit.recipes.run_plan import RunPlan

KEY = "teacher_model_name_or_path"


def open_teacher(plan: RunPlan, tokenizer: Tokenizer) -> Found:
    """Refused where its tokens are not the student's: probabilities are compared id by id."""
    cfg = plan.config
    name = str(cfg.distill.teacher_model_name_or_path)
    try:
        found = find_model(name, hub=cfg.model.download_hub, verify=cfg.checkpoint.verify)
    except ErnieKitError as error:  # which of the two models it is
        raise ConfigError(error.what, where=KEY, fix=error.fix) from error
    teacher, student = found.weights.config, plan.folder.config
    refuse_score_head(teacher.labels, "distillation", f"{KEY}: {found.describe()}")
    if teacher.vision is not None or student.vision is not None:
        raise ConfigError(
            "distillation is of text models", where=cfg.origin(KEY), fix="leave teacher_model_name_or_path out"
        )
    if plan.mtp_tokens:
        raise ConfigError(
            "layers that predict further tokens have no teacher here",
            where=f"{cfg.origin(KEY)} and num_nextn_predict_layers",
            fix="num_nextn_predict_layers: 0",
        )
    if teacher.vocab_size != student.vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.vocab_size:,} tokens, the model {student.vocab_size:,}",
            where=f"{KEY}: {found.weights.path}",
            fix="take a teacher of the same family: both must have one vocabulary",
        )
    _same_tokens(found, tokenizer)
    return found


def _same_tokens(found: Found, tokenizer: Tokenizer) -> None:
    if not found.has_tokenizer_files():
        return  # nothing to compare: the size of the vocabulary is the same
    other = found.tokenizer()
    ids = range(min(len(other), len(tokenizer)))
    own, teacher = tokenizer.pieces(ids), other.pieces(ids)
    apart = next((i for i in ids if own[i] != teacher[i]), None)
    if apart is None and len(other) == len(tokenizer):
        return
    what = f"they have {len(other):,} and {len(tokenizer):,} tokens"
    if apart is not None:
        what = f"token {apart} is {teacher[apart]!r} there and {own[apart]!r} here"
    raise ConfigError(
        f"the teacher's tokenizer is another one: {what}",
        where=f"{KEY}: {found.weights.path}",
        fix="take a teacher with the same tokenizer",
    )


def mix_of(cfg: RunConfig) -> Mix:
    d = cfg.distill
    return Mix(d.distill_alpha, d.distill_temperature, d.distill_kl == "reverse")


def install(cfg: RunConfig, built: Built, found: Found) -> None:
    install_model(cfg, built, found.build(built.dtype, built.device.handle))
    d, count = cfg.distill, costs.parameters(found.weights.config)
    whole = ", whole on every rank" if built.world.size > 1 else ""
    soft = f"{d.distill_alpha:g} x {d.distill_kl} KL at temperature {d.distill_temperature:g}"
    hard = f"{1 - d.distill_alpha:g} x cross-entropy"
    emit(f"teacher  {found.describe()} ({count:,} weights{whole}): {soft} + {hard}")


def install_model(cfg: RunConfig, built: Built, teacher: nn.Module) -> None:
    """The teacher into the run's loss, and the comparing head into the model."""
    loss = built.engine.loss
    assert isinstance(loss, DistillationLoss)
    for param in teacher.parameters():
        param.requires_grad_(False)
    teacher.output = KeptHidden()
    head = DistillingHead(built.engine.model.output, mix_of(cfg))  # type: ignore[arg-type]
    built.engine.model.output = head
    loss.teacher, loss.head = teacher, head
