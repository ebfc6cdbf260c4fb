"""Distillation: against TRL's divergence on a tiny Llama, against autograd with whole logits, and chunk by chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from erniekit.data.collate import collate
from erniekit.data.types import IGNORE, Pack, Sample
from erniekit.kernels.distillation import Mix, Teacher, linear_distillation
from erniekit.losses.causal import causal_loss
from erniekit.losses.distillation import METRICS, DistillationLoss, DistillingHead, KeptHidden
from erniekit.parallel.step_metrics import StepMetrics
from support.trl_recorded import REFERENCE_SCALE, gradient_norms, model, recorded


def recorded_batch(packs: int):
    told = recorded("distillation")
    samples = []
    for row, start in zip(told["rows"], told["starts"]):
        ids = torch.tensor(row[:-1], dtype=torch.int32).numpy()
        labels = torch.tensor(row[1:], dtype=torch.int32).numpy()
        labels[: start - 1] = IGNORE
        samples.append(Sample(ids, labels))
    size = len(samples) // packs
    return collate([Pack(tuple(samples[k * size : (k + 1) * size]), k) for k in range(packs)])


def distilling(mix: Mix) -> tuple[torch.nn.Module, DistillationLoss, StepMetrics]:
    student, teacher, metrics = model(), model(REFERENCE_SCALE).eval(), StepMetrics(METRICS, torch.device("cpu"))
    teacher.output = KeptHidden()
    student.output = DistillingHead(student.output, mix)
    loss = DistillationLoss(4, metrics)
    loss.teacher, loss.head = teacher, student.output
    return student.train(), loss, metrics


@pytest.mark.parametrize("run", range(4))
@pytest.mark.parametrize("packs", [1, 4], ids=["packed", "a row each"])
def test_the_divergence_and_its_gradients_are_trls(run, packs):
    told, batch = recorded("distillation")["runs"][run], recorded_batch(packs)
    student, loss_of, metrics = distilling(Mix(1.0, told["temperature"], reverse=told["beta"] == 1.0))
    loss = loss_of(student, batch) / batch.num_label_tokens
    loss.backward()
    # fp32 on both sides; a divergence of a few hundredths is a difference of numbers near 4
    assert loss.item() == pytest.approx(told["loss"], rel=2e-5)
    assert dict(zip(METRICS, metrics.reduce(None).tolist()))["kl_loss"] == pytest.approx(told["loss"], rel=2e-5)
    assert gradient_norms(student) == pytest.approx(told["gradients"], rel=5e-4, abs=1e-6)


@pytest.mark.parametrize("scale", [None, 0.25], ids=["as a sum", "scaled"])
@pytest.mark.parametrize("mix", [Mix(0.3, 2.0), Mix(0.7, 0.5, reverse=True), Mix(0.0), Mix(1.0)], ids=str)
def test_chunks_give_what_whole_logits_give(mix, scale):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden, weight, bias = draw(11, 6).requires_grad_(), draw(17, 6).requires_grad_(), draw(17).requires_grad_()
    teacher = Teacher(draw(11, 5), draw(17, 5), draw(17))
    labels = torch.randint(0, 17, (11,), generator=generator)
    labels[[0, 4]] = IGNORE
    loss, told = linear_distillation(hidden, weight, labels, bias, teacher, mix, chunk=4, scale=scale)
    loss.backward()
    found = [t.grad.clone() for t in (hidden, weight, bias)]
    whole = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    on = labels != IGNORE
    logits = F.linear(whole[0], whole[1], whole[2])[on]
    other = F.linear(*(t.double() for t in teacher))[on]
    q, p = (logits / mix.temperature).log_softmax(-1), (other / mix.temperature).log_softmax(-1)
    apart = (q.exp() * (q - p)).sum() if mix.reverse else (p.exp() * (p - q)).sum()
    hard = F.cross_entropy(logits, labels[on], reduction="sum")
    expected = (mix.alpha * apart + (1 - mix.alpha) * hard) * (scale or 1.0)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert told.tolist() == pytest.approx([hard.item(), apart.item()], rel=1e-5)
    for mine, exact in zip(found, whole):
        torch.testing.assert_close(mine.double(), exact.grad, atol=2e-6, rtol=1e-5)


def test_without_weight_on_the_teacher_it_is_sft_and_so_is_an_evaluation():
    batch = recorded_batch(1)
    expected = causal_loss(model(), batch).item()
    student, loss_of, _ = distilling(Mix(0.0))
    assert loss_of(student, batch).item() == pytest.approx(expected, rel=1e-6)
    student, loss_of, _ = distilling(Mix(1.0))
    assert loss_of(student.eval(), batch).item() == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_labels_costs_nothing():
    batch = recorded_batch(1)
    student, loss_of, _ = distilling(Mix())
    batch.labels.fill_(IGNORE)
    batch.num_label_tokens = 0
    assert loss_of(student, batch).item() == 0.0
