"""A loss function of one's own: the built-in loss written by hand has its value and gradients, in chunks and scaled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import erniekit
from erniekit.errors import ConfigError
from erniekit.losses.own import OwnLossHead, TokenLoss
from erniekit.models.layers.head import LocalHead
from support.ranks import Ranks

CASES = {
    "logits": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    "logprobs": lambda logprobs: -logprobs,
    "both orders": lambda labels, logprobs, sharpness=1.0: -logprobs * sharpness,
}


def tensors() -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 8, generator=made, requires_grad=True)
    weight, bias = (torch.randn(*shape, generator=made, requires_grad=True) for shape in ((11, 8), (11,)))
    labels = torch.randint(0, 11, (2, 7), generator=made)
    labels[:, ::3] = -100
    return hidden, weight, labels, bias


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [3, 100])
def test_cross_entropy_by_hand_is_the_built_in_loss_with_its_gradients(case: str, chunk: int) -> None:
    own = OwnLossHead(LocalHead(), TokenLoss.of(CASES[case], case))
    told = []
    for head in (LocalHead(), own):
        hidden, weight, labels, bias = tensors()
        loss = head.loss(hidden, weight, labels, bias, -100, chunk, None, 0.25)
        loss.backward()
        told.append((loss.detach(), hidden.grad, weight.grad, bias.grad))
    for theirs, ours in zip(*told):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    hidden, weight, labels, bias = tensors()
    assert torch.equal(own.logits(hidden, weight, bias), LocalHead().logits(hidden, weight, bias))


@pytest.mark.parametrize("case", CASES)
def test_without_a_trained_token_there_is_no_call_and_the_gradient_is_zero(case: str) -> None:
    hidden, weight, labels, bias = tensors()
    loss = OwnLossHead(LocalHead(), TokenLoss.of(CASES[case], case)).loss(
        hidden, weight, torch.full_like(labels, -100), bias, -100, 4
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda logprobs: 3.0, "gave float, not a tensor"),
        (lambda logprobs: logprobs.mean(), r"the shape \[\] for 8 trained tokens"),
        (lambda logprobs: logprobs.detach(), "do not depend on logprobs"),
    ],
)
def test_what_is_no_loss_of_each_token_is_refused_by_the_functions_name(function, why: str) -> None:
    hidden, weight, labels, bias = tensors()
    with pytest.raises(ConfigError, match=f"mine.*{why}"):
        OwnLossHead(LocalHead(), TokenLoss.of(function, "mine")).loss(hidden, weight, labels, bias, -100, 100)


def curve(model: str, rows: list[dict], output: str, kind: str, keys: dict) -> list[float]:
    """On a rank, too."""
    settings = dict(
        compute_type="fp32", device="cpu", learning_rate=5e-3, max_seq_len=64, doctor="off", report_to="none",
        dataset_num_proc=1, max_steps=2, fine_tuning="Full",
    )  # fmt: skip
    loss = CASES.get(kind)
    run = erniekit.train(model_name_or_path=model, data=rows, output_dir=output, loss=loss, **settings | keys)
    return run.metrics["loss"]


def rows() -> list[dict]:
    return [{"src": [f"What is {k}?"], "tgt": [f"It is {'number ' * (k % 4)}{k}."]} for k in range(12)]


def test_runs_with_it_are_those_with_the_built_in_loss_however_micro_batches_are_cut(
    tmp_path: Path, monkeypatch
) -> None:
    from erniekit.demo.tiny import make_tiny_model

    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    model = str(make_tiny_model(tmp_path / "model"))
    parts = {"packing": False, "batch_size": 1, "gradient_accumulation_steps": 4}
    whole = {"packing": False, "batch_size": 4, "gradient_accumulation_steps": 1}
    built_in = curve(model, rows(), str(tmp_path / "built-in"), "", parts)
    for kind, keys in (("logits", parts), ("logprobs", whole)):
        assert curve(model, rows(), str(tmp_path / kind), kind, keys) == pytest.approx(built_in, abs=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree"])
def test_two_ranks_train_with_it_as_one_and_tensor_parallel_refuses_logits(
    layout: str, tmp_path: Path, ranks: Ranks, monkeypatch
) -> None:
    from erniekit.demo.tiny import make_tiny_model

    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    model = str(make_tiny_model(tmp_path / "model"))
    keys = {"packing": False, "batch_size": 1, "gradient_accumulation_steps": 4}
    one = curve(model, rows(), str(tmp_path / "one"), "logprobs", keys)
    spread = keys | {layout: 2} | ({"gradient_accumulation_steps": 2} if layout.startswith("sharding") else {})
    for told in ranks.run(2, curve, model, rows(), str(tmp_path / "two"), "logprobs", spread):
        assert told == pytest.approx(one, abs=2e-5)
    if layout == "tensor_parallel_degree":
        with pytest.raises(AssertionError, match="takes logits, which tensor_parallel_degree: 2 never joins"):
            ranks.run(2, curve, model, rows(), str(tmp_path / "refused"), "logits", spread)
    else:
        for told in ranks.run(2, curve, model, rows(), str(tmp_path / "logits"), "logits", spread):
            assert told == pytest.approx(one, abs=2e-5)
