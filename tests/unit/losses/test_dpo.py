"""Preference losses: worked by hand, by finite differences, and packed with shared prompts against two sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from erniekit.config.flat import KEYS
from erniekit.data.types import IGNORE, Batch, Pairs, SharedKeys
from erniekit.loss_table import PREFERENCE_LOSSES
from erniekit.losses.dpo import (
    IMPLEMENTATIONS,
    Answers,
    DpoSettings,
    dpo_loss,
    metric_names,
    pair_log_probs,
    rewards,
    sft_losses,
)
from erniekit.models.config import DecoderConfig
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from erniekit.parallel.collectives import sum_from
from erniekit.parallel.context import KeysOfAll, split
from erniekit.parallel.step_metrics import StepMetrics
from support.pair_losses import dpo_losses
from support.ranks import Ranks

CONFIG = DecoderConfig(
    family="ernie4_5", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", tie_word_embeddings=True, max_positions=128,
)  # fmt: skip
ONE = Answers(torch.ones(1), torch.ones(1))  # lengths at which means are sums
Sequences = tuple[list[int], list[int], list[int]]  # prompt, chosen, rejected


# --- arithmetic ---


def loss_of(policy: tuple[float, float], reference: tuple[float, float], score_delta: float = 1.0, **keys) -> float:
    tensors = [torch.tensor([value], dtype=torch.float64) for value in (*policy, *reference)]
    settings = DpoSettings(**{"beta": 0.5, **keys})
    return float(dpo_losses(*tensors, settings, ONE, torch.tensor([score_delta], dtype=torch.float64)))


# Chosen has gained 2 over the reference, rejected has lost 1; beta is a half, so the reward margin is 1.5.
GAINED = ((-3.0, -6.0), (-5.0, -5.0))
LOST = ((-6.0, -3.0), (-5.0, -5.0))
BY_HAND = {
    "sigmoid": (GAINED, {}, math.log(1 + math.exp(-1.5))),
    "sigmoid, a tenth swapped": (GAINED, {"label_smoothing": 0.1}, math.log(1 + math.exp(-1.5)) + 0.1 * 1.5),
    "sigmoid with an offset": (GAINED, {"offset_alpha": 0.3}, math.log(1 + math.exp(-1.2))),
    "hinge": (GAINED, {}, 0.0),
    "hinge, lost": (LOST, {}, 2.5),
    "simpo": (GAINED, {}, math.log(1 + math.exp(-1.0))),
    "simpo, a tenth swapped": (GAINED, {"label_smoothing": 0.1}, math.log(1 + math.exp(-1.0)) + 0.1),
    "ipo": (GAINED, {}, (3 - 1) ** 2),
    "dpop": (GAINED, {}, math.log(1 + math.exp(-1.5))),
    "dpop, lost": (LOST, {"dpop_lambda": 4.0}, math.log(1 + math.exp(1.5)) + 4.0),
    "kto_pair": (GAINED, {}, (1 / (1 + math.exp(1.0)) + 1 / (1 + math.exp(1.5))) / 2),
    "sppo_hard": (GAINED, {}, (2 - 1) ** 2 + (-1 + 1) ** 2),
    "nca_pair": (
        GAINED,
        {},
        math.log(1 + math.exp(-1.0)) + 0.5 * math.log(1 + math.exp(1.0)) + 0.5 * math.log(1 + math.exp(-0.5)),
    ),
    # Odds of 0.8 and 0.5 are 4 and 1.
    "or": (((math.log(0.8), math.log(0.5)), (0.0, 0.0)), {}, math.log(1 + 1 / 4)),
    "orpo": (((math.log(0.8), math.log(0.5)), (-1.0, -2.0)), {}, math.log(1 + 1 / 4)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pair_worked_by_hand(name):
    (policy, reference), keys, expected = BY_HAND[name]
    kind = name.split(",")[0].split(" ")[0]
    delta = math.e - 1e-6 if "offset" in name else 1.0
    assert loss_of(policy, reference, delta, loss_type=kind, **keys) == pytest.approx(expected, abs=1e-12)


def test_config_and_losses_know_the_same_loss_types():
    assert tuple(IMPLEMENTATIONS) == tuple(PREFERENCE_LOSSES) == KEYS["loss_type"].choices
    assert all(loss.what for loss in PREFERENCE_LOSSES.values())


def test_every_loss_type_has_a_pair_worked_by_hand():
    assert {name.split(",")[0].split(" ")[0] for name in BY_HAND} == set(PREFERENCE_LOSSES)


def test_kto_measures_each_side_against_the_other_sides_mean_gain():
    """Gains 2, 4 (mean 3) and 1, -2 (mean -1/2, which counts as 0), at beta 1."""
    logps = [torch.tensor(x, dtype=torch.float64) for x in ([2.0, 4.0], [1.0, -2.0], [0.0, 0.0], [0.0, 0.0])]
    losses = dpo_losses(*logps, DpoSettings("kto_pair", beta=1.0, normalize_logps=False), ONE)
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = [(2 - sigma(2) - sigma(3 - 1)) / 2, (2 - sigma(4) - sigma(3 + 2)) / 2]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_gradients_equal_finite_differences(kind, normalize):
    generator = torch.Generator().manual_seed(3)
    lengths = Answers(torch.tensor([3.0, 5.0, 1.0]), torch.tensor([4.0, 2.0, 7.0]))
    sums = [-(0.5 + torch.rand(3, generator=generator, dtype=torch.float64)) * n for n in (*lengths, *lengths)]
    settings = DpoSettings(kind, 0.7, 0.1, offset_alpha=0.2, dpop_lambda=3.0, normalize_logps=normalize)
    delta = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in sums[:2]]
    assert torch.autograd.gradcheck(
        lambda chosen, rejected: dpo_losses(chosen, rejected, *sums[2:], settings, lengths, delta), leaves
    )


def test_normalised_log_probs_are_as_if_both_answers_had_the_mean_length():
    """Lengths 2 and 6, mean 4: the chosen sum counts twice, the rejected one two thirds; the reference's likewise."""
    lengths = Answers(torch.tensor([2.0]), torch.tensor([6.0]))
    sums = [torch.tensor([x]) for x in (-3.0, -9.0, -4.0, -6.0)]
    margin = (2 * -3.0 - 2 / 3 * -9.0) - (2 * -4.0 - 2 / 3 * -6.0)
    loss = dpo_losses(*sums, DpoSettings(beta=0.5), lengths)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-0.5 * margin)), rel=1e-6)


@pytest.mark.parametrize("kind", ["ipo", "simpo", "or"])
def test_averaging_types_do_not_care_how_long_an_answer_is(kind):
    short, long = (Answers(torch.tensor([n]), torch.tensor([3 * n])) for n in (2.0, 20.0))
    losses = [
        dpo_losses(-2.0 * n.chosen, -1.5 * n.rejected, -1.9 * n.chosen, -1.6 * n.rejected, DpoSettings(kind), n)
        for n in (short, long)
    ]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["or", "orpo"])
def test_an_answer_that_is_certain_still_has_a_finite_loss_and_gradient(kind):
    policy = [torch.zeros(1).requires_grad_(), torch.tensor([-2.0]).requires_grad_()]
    loss = dpo_losses(*policy, None, None, DpoSettings(kind), ONE).sum()
    loss.backward()
    assert all(torch.isfinite(x).all() for x in (loss, policy[0].grad, policy[1].grad))


def test_rewards_are_beta_times_the_gain_and_without_reference_the_log_prob():
    policy, reference = Answers(torch.tensor([-3.0]), torch.tensor([-6.0])), Answers(*torch.full((2, 1), -5.0))
    assert [float(x) for x in rewards(policy, reference, 0.5)] == [1.0, -0.5]
    assert [float(x) for x in rewards(policy, None, 0.5)] == [-1.5, -3.0]


def test_the_sft_term_is_each_pairs_own_mean_or_the_mean_of_all_tokens():
    chosen, lengths = torch.tensor([-6.0, -4.0]), torch.tensor([2.0, 8.0])
    assert sft_losses(chosen, lengths).tolist() == [3.0, 0.5]
    assert sft_losses(chosen, lengths, batch_means=True).tolist() == [1.0, 1.0]


def test_orpo_is_or_without_reference_and_with_the_sft_term():
    orpo, plain = DpoSettings("orpo", sft_loss_ratio=0.0), DpoSettings("sigmoid", sft_loss_ratio=0.25)
    assert (orpo.needs_reference, orpo.sft_ratio, orpo.loss_name) == (False, 1.0, "or_loss")
    assert (plain.needs_reference, plain.sft_ratio, plain.loss_name) == (True, 0.25, "sigmoid_loss")
    assert not replace(plain, reference_free=True).needs_reference


# --- with a model ---


def model(seed: int = 1) -> Decoder:
    built = Decoder(CONFIG)
    init_weights(built, seed=seed, std=0.3)
    return built


def sequences(seed: int, *lengths: tuple[int, int, int]) -> list[Sequences]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 61, (n,), generator=generator).tolist()  # noqa: E731
    return [(draw(prompt), draw(chosen), draw(rejected)) for prompt, chosen, rejected in lengths]


def packed(rows: list[list[Sequences]], length: int) -> Batch:
    """Rows of pairs: prompt but its last token | that token, chosen | that token again, rejected; then padding."""
    ids, labels, positions, segment, sizes, keys = [], [], [], [], [], []
    pair = 0
    for number, row in enumerate(rows):
        start = number * length
        for prompt, chosen, rejected in row:
            common, answers = len(prompt) - 1, (chosen, rejected)
            ids += [*prompt[:-1], *(t for a in answers for t in (prompt[-1], *a[:-1]))]
            labels += [*[IGNORE] * common, *chosen, *rejected]
            positions += [*range(common), *(common + i for a in answers for i in range(len(a)))]
            segment += [*[-1] * common, *[2 * pair] * len(chosen), *[2 * pair + 1] * len(rejected)]
            middle = start + common + len(chosen)
            keys += [range(start, middle), [*range(start, start + common), *range(middle, middle + len(rejected))]]
            sizes += [common + len(chosen), len(rejected)]
            start, pair = middle + len(rejected), pair + 1
        left = (number + 1) * length - start
        if left:
            ids, labels, segment = ids + [0] * left, labels + [IGNORE] * left, segment + [-1] * left
            positions, sizes = positions + list(range(left)), [*sizes, left]
            keys.append(range(start, start + left))
    grid = lambda values: torch.tensor(values).view(len(rows), length)  # noqa: E731
    bounds = lambda counts: torch.tensor([0, *counts]).cumsum(0).to(torch.int32)  # noqa: E731
    counts = [len(k) for k in keys]
    shared = SharedKeys(torch.tensor([i for k in keys for i in k]), bounds(counts), max(counts))
    return Batch(
        grid(ids), grid(labels), grid(positions), bounds(sizes), max(sizes), sum(x != IGNORE for x in labels),
        real=grid(ids) != 0, shared=shared, pairs=Pairs(grid(segment), pair, torch.ones(pair)),
    )  # fmt: skip


ROWS = [sequences(0, (5, 4, 6), (9, 1, 3), (1, 3, 2)), sequences(1, (7, 12, 1))]
LENGTH = 40


def with_reference(batch: Batch, seed: int = 2) -> Batch:
    with torch.no_grad():
        known = pair_log_probs(model(seed), batch)
    return replace(batch, pairs=replace(batch.pairs, reference=known))


def log_prob(built: Decoder, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The plain way: one sequence, all logits."""
    logits = built(torch.tensor([[*prompt, *answer[:-1]]])).log_softmax(-1)
    return logits[0, torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1), answer].sum()


def two_sequence_loss(built: Decoder, reference: Decoder, pairs: list[Sequences], beta: float = 0.1) -> torch.Tensor:
    total = torch.zeros(())
    for prompt, chosen, rejected in pairs:
        gain = [log_prob(built, prompt, a) - log_prob(reference, prompt, a).detach() for a in (chosen, rejected)]
        mean = (len(chosen) + len(rejected)) / 2
        margin = gain[0] * (mean / len(chosen)) - gain[1] * (mean / len(rejected))
        total = total + torch.log(1 + torch.exp(-beta * margin))
    return total


def gradients(built: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in built.named_parameters()}


@pytest.mark.parametrize("chunk", [5, 2048])
def test_packed_with_shared_prompts_equals_two_sequences_in_loss_and_every_gradient(chunk):
    """fp32: sums of up to 12 tokens in another order."""
    ours, theirs, pairs = model(), model(), [pair for row in ROWS for pair in row]
    loss = dpo_loss(ours, with_reference(packed(ROWS, LENGTH)), settings=DpoSettings(), chunk=chunk)
    expected = two_sequence_loss(theirs, model(2), pairs)
    loss.backward(), expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    wanted = gradients(theirs)
    for name, grad in gradients(ours).items():
        torch.testing.assert_close(grad, wanted[name], atol=1e-5, rtol=1e-4, msg=name)


def test_log_probs_of_every_answer_equal_those_of_its_own_sequence():
    built = model()
    with torch.no_grad():
        ours = pair_log_probs(built, packed(ROWS, LENGTH))
        theirs = [log_prob(built, p, a) for row in ROWS for p, c, r in row for a in (c, r)]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=1e-5)


def test_the_first_step_loses_ln_2_a_pair():
    batch = with_reference(packed(ROWS, LENGTH), seed=1)
    loss = dpo_loss(model(1), batch, settings=DpoSettings())
    assert float(loss) == pytest.approx(4 * math.log(2), abs=1e-6)


def test_every_metric_is_told_under_erniekits_name():
    batch, settings = with_reference(packed(ROWS, LENGTH)), DpoSettings(sft_loss_ratio=0.5, normalize_logps=False)
    step_metrics = StepMetrics(metric_names(settings), torch.device("cpu"))
    loss = dpo_loss(model(), batch, settings=settings, step_metrics=step_metrics)
    told = dict(zip(step_metrics.names, step_metrics.reduce(None).tolist()))
    with torch.no_grad():
        logps = pair_log_probs(model(), batch)
    gain = 0.1 * (logps - batch.pairs.reference)
    lengths = torch.tensor([4.0, 1.0, 3.0, 12.0])
    expected = {
        "rewards/chosen": gain[0::2].mean(),
        "rewards/rejected": gain[1::2].mean(),
        "rewards/accuracies": (gain[0::2] > gain[1::2]).float().mean(),
        "rewards/margins": (gain[0::2] - gain[1::2]).mean(),
        "logps/chosen": logps[0::2].mean(),
        "logps/rejected": logps[1::2].mean(),
        "sigmoid_loss": loss.detach() / 4 - 0.5 * (-logps[0::2] / lengths).mean(),
        "sft_loss": 0.5 * (-logps[0::2] / lengths).mean(),
    }
    assert told == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_orpo_tells_log_odds_and_needs_no_reference():
    settings = DpoSettings("orpo")
    step_metrics = StepMetrics(metric_names(settings), torch.device("cpu"))
    dpo_loss(model(), packed(ROWS, LENGTH), settings=settings, step_metrics=step_metrics)
    told = dict(zip(step_metrics.names, step_metrics.reduce(None).tolist()))
    assert told["or_loss"] == pytest.approx(-told["log_odds_chosen"], rel=1e-6)
    assert all(math.isfinite(value) for value in told.values())


def test_the_ratios_weigh_both_terms():
    batch = with_reference(packed(ROWS, LENGTH))
    value = lambda **keys: float(dpo_loss(model(), batch, settings=DpoSettings(**keys)).detach())  # noqa: E731
    pref, sft = value(), value(pref_loss_ratio=0.0, sft_loss_ratio=1.0)
    assert value(pref_loss_ratio=0.3, sft_loss_ratio=2.0) == pytest.approx(0.3 * pref + 2.0 * sft, rel=1e-5)
    with torch.no_grad():
        chosen = pair_log_probs(model(), batch)[0::2]
    over_tokens = value(pref_loss_ratio=0.0, sft_loss_ratio=1.0, batch_means=True)
    assert over_tokens == pytest.approx(4 * float(-chosen.sum()) / 20, rel=1e-5)


# --- over ranks ---


def on_ranks_of_a_sequence() -> tuple[float, float]:
    """How far the loss and the farthest gradient are from those of one process."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    batch, settings = with_reference(packed(ROWS, LENGTH)), DpoSettings(sft_loss_ratio=0.5)
    alone, shared = model(), model()
    whole = dpo_loss(alone, batch, settings=settings)
    whole.backward()
    for layer in shared.layers:
        layer.attn.inner.all_keys = KeysOfAll(group)
    mine = split(batch, rank, size)
    step_metrics = StepMetrics(metric_names(settings), torch.device("cpu"))
    together = dict(sum_over_cp=lambda x: sum_from(x, group), copies=size)
    loss = dpo_loss(shared, mine, settings=settings, step_metrics=step_metrics, **together)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    alone_metrics = StepMetrics(metric_names(settings), torch.device("cpu"))
    dpo_loss(alone, batch, settings=settings, step_metrics=alone_metrics)
    torch.testing.assert_close(step_metrics.reduce(group), alone_metrics.reduce(None), atol=1e-5, rtol=1e-5)
    far = 0.0
    wanted = gradients(alone)
    for name, grad in gradients(shared).items():
        dist.all_reduce(grad)
        far = max(far, float((grad - wanted[name]).abs().max()))
    return abs(float(total) - float(whole.detach())), far


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_share_a_sequence_have_one_loss_and_its_gradients(ranks: Ranks, count: int):
    for loss_off, gradient_off in ranks.run(count, on_ranks_of_a_sequence):
        assert loss_off < 1e-5
        assert gradient_off < 1e-5
