"""Preference losses: from the log-probabilities of two answers to one number a pair, for all loss types of ERNIEKit.

`dpo_loss` is what train/step.py and evaluate.py call (recipes/dpo.py binds its settings), `pair_log_probs` the
reference's pass. The other functions are arithmetic on [pairs]; chosen and rejected are sums of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.data.types import IGNORE, Batch
from erniekit.kernels.cross_entropy import CHUNK
from erniekit.loss_table import PAIR_ARGUMENTS, PreferenceLoss, metric_name, preference_loss
from erniekit.losses.own_preference import PairLoss

SURE = -1e-7  # the highest mean log-probability whose odds are still a number


@dataclass(frozen=True)
class DpoSettings:
    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    pref_loss_ratio: float = 1.0
    sft_loss_ratio: float = 0.0
    offset_alpha: float = 0.0
    simpo_gamma: float = 0.5
    dpop_lambda: float = 50.0
    normalize_logps: bool = True
    reference_free: bool = False
    # ERNIEKit: the SFT term is a mean over the chosen tokens of a micro-batch, a metric the mean of micro-batch means.
    batch_means: bool = False
    own: PairLoss | None = None  # what `loss_type` names, where it is none of IMPLEMENTATIONS

    @property
    def loss(self) -> PreferenceLoss:
        return preference_loss(self.loss_type)

    @property
    def needs_reference(self) -> bool:
        return self.loss.needs_reference and not self.reference_free

    @property
    def sft_ratio(self) -> float:
        return self.sft_loss_ratio if self.loss.sft_ratio is None else self.loss.sft_ratio

    @property
    def loss_name(self) -> str:
        """What the loss is logged as."""
        return metric_name(self.loss_type)


class Answers(NamedTuple):
    """One number for each pair's chosen and rejected answer, [pairs] each."""

    chosen: torch.Tensor
    rejected: torch.Tensor


class MetricsSink(Protocol):
    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | float) -> None: ...


def metric_names(settings: DpoSettings) -> tuple[str, ...]:
    """The metrics that `dpo_loss` adds, as ERNIEKit calls them."""
    rewards = tuple(f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))
    odds = ("log_odds_ratio", "log_odds_chosen") if settings.loss.log_odds else ()
    return (*rewards, "logps/chosen", "logps/rejected", settings.loss_name, "sft_loss", *odds)


def even_lengths(sums: Answers, lengths: Answers, settings: DpoSettings) -> Answers:
    """Log-probabilities as the loss takes them: means, or sums as if both answers had the pair's mean length."""
    if settings.loss.per_token:
        return Answers(sums.chosen / lengths.chosen.clamp(min=1), sums.rejected / lengths.rejected.clamp(min=1))
    if not settings.normalize_logps:
        return sums
    mean = (lengths.chosen + lengths.rejected) / 2
    return Answers(*(s * (mean / n.clamp(min=1)) for s, n in zip(sums, lengths)))


def log_odds(logps: Answers) -> torch.Tensor:
    """log of odds(chosen) / odds(rejected), where odds(p) = p / (1 - p); ORPO, arXiv 2403.07691, equation 4."""
    chosen, rejected = (x - (-x.clamp(max=SURE).expm1()).log() for x in logps)
    return chosen - rejected


def preference_losses(
    policy: Answers, reference: Answers | None, settings: DpoSettings, score_delta: torch.Tensor | None = None
) -> torch.Tensor:
    """[pairs], before pref_loss_ratio; log-probabilities with even lengths. reference None is zero."""
    if reference is None:
        reference = Answers(*(torch.zeros_like(x) for x in policy))
    if settings.own is not None:
        return settings.own(dict(zip(PAIR_ARGUMENTS, (*policy, *reference, score_delta, settings.beta))))
    gained = Answers(policy.chosen - reference.chosen, policy.rejected - reference.rejected)
    return IMPLEMENTATIONS[settings.loss_type](PairScores(policy, gained, score_delta), settings)


class PairScores(NamedTuple):
    """What a loss type sees of the pairs, with even lengths."""

    policy: Answers
    gained: Answers  # policy less reference
    score_delta: torch.Tensor | None  # [pairs], where the data has scores

    @property
    def margin(self) -> torch.Tensor:
        return self.gained.chosen - self.gained.rejected


def _sigmoid(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    margin, beta = pairs.margin, settings.beta
    if settings.offset_alpha > 0 and pairs.score_delta is not None:
        margin = margin - settings.offset_alpha / beta * (pairs.score_delta + 1e-6).log()
    return _smoothed(beta * margin, settings.label_smoothing)


def _simpo(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    return _smoothed(settings.beta * pairs.margin - settings.simpo_gamma, settings.label_smoothing)


def _hinge(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    return (1 - settings.beta * pairs.margin).relu()


def _ipo(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    return (pairs.margin - 0.5 / settings.beta) ** 2


def _dpop(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    # As ERNIEKit: the penalty is added to the log-sigmoid, not inside it as in arXiv 2402.13228.
    penalty = (-pairs.gained.chosen).relu()
    return -F.logsigmoid(settings.beta * pairs.margin) + settings.dpop_lambda * penalty


def _kto_pair(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    """Each side against the mean of the other side over these pairs: the only type where a pair's loss depends on
    others."""
    (chosen, rejected), beta = pairs.gained, settings.beta
    against_rejected, against_chosen = rejected.mean().relu(), chosen.mean().relu()
    better = 1 - (beta * (chosen - against_rejected)).sigmoid()
    return (better + 1 - (beta * (against_chosen - rejected)).sigmoid()) / 2


def _sppo_hard(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    return (pairs.gained.chosen - 0.5 / settings.beta) ** 2 + (pairs.gained.rejected + 0.5 / settings.beta) ** 2


def _nca_pair(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    one, other = settings.beta * pairs.gained.chosen, settings.beta * pairs.gained.rejected
    return -F.logsigmoid(one) - 0.5 * F.logsigmoid(-one) - 0.5 * F.logsigmoid(-other)


def _odds_ratio(pairs: PairScores, settings: DpoSettings) -> torch.Tensor:
    return -F.logsigmoid(log_odds(pairs.policy))


IMPLEMENTATIONS: dict[str, Callable[[PairScores, DpoSettings], torch.Tensor]] = {  # names: loss_table.py
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "simpo": _simpo,
    "ipo": _ipo,
    "dpop": _dpop,
    "kto_pair": _kto_pair,
    "sppo_hard": _sppo_hard,
    "nca_pair": _nca_pair,
    "or": _odds_ratio,
    "orpo": _odds_ratio,
}


def _smoothed(x: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -F.logsigmoid(x) * (1 - smoothing) - F.logsigmoid(-x) * smoothing


def rewards(policy: Answers, reference: Answers | None, beta: float) -> Answers:
    if reference is None:
        return Answers(*(beta * x for x in policy))
    return Answers(*(beta * (x - r) for x, r in zip(policy, reference)))


def sft_losses(chosen: torch.Tensor, lengths: torch.Tensor, batch_means: bool = False) -> torch.Tensor:
    """[pairs], before sft_loss_ratio: the mean loss of a pair's chosen tokens, or for all the mean of all of them."""
    if batch_means:
        return (-chosen.sum() / lengths.sum().clamp(min=1)).expand_as(chosen)
    return -chosen / lengths.clamp(min=1)


# --- with a model ---

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def pair_log_probs(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    sum_over_cp: SumOverRanks | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """fp32 [2 * pairs]: chosen and rejected sums of log-probabilities in turn, as in `Pairs.reference`."""
    return answer_sums(model, batch, hidden, sum_over_cp, chunk)[0]


def dpo_loss(
    model: nn.Module,
    batch: Batch,
    hidden: torch.Tensor | None = None,
    *,
    settings: DpoSettings,
    step_metrics: MetricsSink | None = None,
    sum_over_cp: SumOverRanks | None = None,
    copies: int = 1,
    chunk: int = CHUNK,
    scale: float | None = None,
) -> torch.Tensor:
    """The SUM of the pairs' losses (fp32), times scale: the pairs of the whole global batch divide it, before or after.

    sum_over_cp: adds up what the ranks that share a sequence have of each answer, forward only (the gradient of a sum
    is that of its parts). copies: how many those ranks are; each then holds the whole loss and returns its share of it.
    """
    assert batch.pairs is not None
    sums, lengths = answer_sums(model, batch, hidden, sum_over_cp, chunk)
    counts = _answers(lengths)
    policy, reference = even_lengths(_answers(sums), counts, settings), None
    if settings.needs_reference:
        assert batch.pairs.reference is not None, "the reference's log-probabilities come before the step"
        reference = even_lengths(_answers(batch.pairs.reference), counts, settings)
    preferred = settings.pref_loss_ratio * preference_losses(policy, reference, settings, batch.pairs.score_delta)
    supervised = settings.sft_ratio * sft_losses(_answers(sums).chosen, counts.chosen, settings.batch_means)
    if step_metrics is not None:
        with torch.no_grad():
            metrics = _metrics(policy, rewards(policy, reference, settings.beta), preferred, supervised, settings)
            each = max(1, batch.pairs.count) if settings.batch_means else 1
            for name, values in metrics.items():
                step_metrics.add(name, values.sum() / each, batch.pairs.count / each)
    return share_of_copies((preferred + supervised).sum(), scale, copies)


def share_of_copies(loss: torch.Tensor, scale: float | None, copies: int) -> torch.Tensor:
    """Times scale, with the whole gradient and one part in `copies` of the value: that many ranks hold it."""
    if scale is not None:
        loss = loss * scale
    return loss if copies == 1 else loss - loss.detach() * (1 - 1 / copies)


def answer_sums(
    model: nn.Module, batch: Batch, hidden: torch.Tensor | None, sum_over_cp: SumOverRanks | None, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and number of tokens of each answer, fp32 [2 * pairs] each."""
    assert batch.pairs is not None
    losses = model(
        batch.input_ids if hidden is None else hidden,
        batch.positions,
        batch.documents(),
        batch.max_doc,
        labels=batch.labels,
        ignore=IGNORE,
        chunk=chunk,
        more=batch.more(),
        per_token=True,
    ).flatten()
    answers, segment = 2 * batch.pairs.count, batch.pairs.segment.flatten()
    where = segment.masked_fill(segment < 0, answers)
    # fp64: thousands of tokens are added up in an order the device chooses, and two such sums are then subtracted.
    each = torch.stack((-losses, torch.ones_like(losses)), dim=1).double()
    sums = each.new_zeros(answers + 1, 2).index_add(0, where, each)[:answers]
    if sum_over_cp is not None:
        sums = sum_over_cp(sums)
    logps, lengths = sums.float().unbind(1)
    return logps, lengths.detach()


def _answers(both: torch.Tensor) -> Answers:
    return Answers(both[0::2], both[1::2])


def _metrics(
    policy: Answers, reward: Answers, preferred: torch.Tensor, supervised: torch.Tensor, settings: DpoSettings
) -> dict[str, torch.Tensor]:
    """[pairs] each, under `metric_names`."""
    metrics = {
        "rewards/chosen": reward.chosen,
        "rewards/rejected": reward.rejected,
        "rewards/accuracies": (reward.chosen > reward.rejected).float(),
        "rewards/margins": reward.chosen - reward.rejected,
        "logps/chosen": policy.chosen,
        "logps/rejected": policy.rejected,
        settings.loss_name: preferred,
        "sft_loss": supervised,
    }
    if settings.loss.log_odds:
        metrics["log_odds_ratio"] = log_odds(policy)
        metrics["log_odds_chosen"] = F.logsigmoid(metrics["log_odds_ratio"])  # the name ERNIEKit gives it
    return metrics
