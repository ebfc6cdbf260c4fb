"""Scales of FP8 training: measured first, each step's own, then their mean; the weights' always those of now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint import fp8_file
from erniekit.errors import CheckpointError
from erniekit.kernels.stored.fp8_static import StaticFormat
from erniekit.models.layers.experts import ExpertLinear
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.rounding import StaticRounding
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.parallel.plan import experts
from erniekit.parallel.sharding import Heads, Sharding
from erniekit.train.fp8_scales import Moving, StaticScales

GOOD, BAD = torch.tensor(1.0), torch.tensor(0.0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = Linear(16, 32, bias=False)
        self.experts = ExpertLinear(3, 16, (("down_proj", 8),))
        nn.init.normal_(self.experts.weight)
        for layer, count in ((self.linear, 1), (self.experts, 3)):
            layer.rounding = StaticRounding(StaticFormat())
            layer.rounding.give_memory(count, torch.device("cpu"))

    def scales(self, moving: Moving | None = None) -> StaticScales:
        sharding = Sharding(
            {name: tuple(p.shape) for name, p in self.named_parameters()}, {"experts": experts()}, Heads(1, 1, 16),
            Layout(), 1, True, {"experts": self.experts.parts},
        )  # fmt: skip
        layers = {"linear": self.linear, "experts": self.experts}
        return StaticScales(layers, sharding, World(), moving or Moving(online_steps=2, rate=0.25), torch.float32)


@pytest.fixture
def model() -> Two:
    return Two()


def sees(model: Two, most: float) -> None:
    """A step whose inputs are at most so large."""
    x = torch.full((2, 16), most / 2)
    x[0, 3] = -most
    model.train()
    model.linear(x)
    model.experts.rounding.keep(torch.tensor([most]))


def scale(model: Two) -> float:
    return float(model.linear.rounding.input_scale) * 448


def test_first_scales_are_those_of_plain_products(model: Two):
    scales = model.scales()
    x = torch.randn(4, 16)
    with torch.no_grad():
        want = x @ model.linear.weight.T
    answers = []

    def run() -> None:
        answers.append(model.linear(x).detach())
        model.experts.rounding.keep(torch.tensor([3.0]))

    scales.measure(run)
    assert torch.equal(answers[0], want)
    assert scale(model) == pytest.approx(float(x.abs().max()))
    assert not torch.equal(model.linear(x).detach(), want), "from now on they are rounded"


def test_each_expert_has_a_weight_scale_and_it_follows_the_weights(model: Two):
    scales = model.scales()
    scales.measure(lambda: sees(model, 1.0))
    with torch.no_grad():
        model.experts.weight[8:16] *= 10
    sees(model, 1.0)
    scales.after_update(GOOD)
    most = model.experts.weight.detach().view(3, -1).abs().amax(1)
    torch.testing.assert_close(model.experts.rounding.weight_scale, most / 448)
    torch.testing.assert_close(model.linear.rounding.weight_scale, model.linear.weight.detach().abs().max()[None] / 448)


def test_scales_follow_each_step_and_then_move_from_the_mean(model: Two):
    scales = model.scales()
    scales.measure(lambda: sees(model, 1.0))
    for most in (4.0, 7.0):
        sees(model, 0.5)
        sees(model, most)  # another micro-batch: the largest of the step counts
        scales.after_update(GOOD)
        assert scale(model) == pytest.approx(most)
    sees(model, 8.0)
    scales.after_update(GOOD)
    mean = (1.0 + 4.0 + 7.0) / 3
    assert scale(model) == pytest.approx(mean + 0.25 * (8.0 - mean))
    assert scales.metrics()["fp8_clipped"] == 2


def test_a_step_that_is_not_applied_moves_nothing(model: Two):
    scales = model.scales()
    scales.measure(lambda: sees(model, 1.0))
    for most, good in ((5.0, BAD), (float("nan"), GOOD), (float("inf"), GOOD)):
        sees(model, most)
        scales.after_update(good)
        assert scale(model) == pytest.approx(1.0)


def test_an_evaluation_moves_nothing(model: Two):
    scales = model.scales()
    scales.measure(lambda: sees(model, 1.0))
    model.eval()
    model.linear(torch.full((2, 16), 9.0))
    model.train()
    with torch.no_grad():
        model.linear(torch.full((2, 16), 9.0))
    scales.after_update(GOOD)
    assert scale(model) == pytest.approx(1.0)


def test_saved_scales_come_back_bit_for_bit(model: Two, tmp_path: Path):
    scales = model.scales()
    scales.measure(lambda: sees(model, 1.1))
    sees(model, 3.3)
    scales.after_update(GOOD)
    fp8_file.save(tmp_path, scales.saved())
    again = Two()
    other = again.scales()
    other.measure(lambda: sees(again, 9.0))
    other.restore(tmp_path)
    for name in ("linear", "experts"):
        mine, theirs = (getattr(m, name).rounding for m in (model, again))
        assert torch.equal(mine.input_scale, theirs.input_scale)
        assert torch.equal(mine.weight_scale, theirs.weight_scale)
    assert other.saved() == scales.saved()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"steps": 1, "highest": 448, "layers": {"linear": {"input_scale": 0, "mean": 1, "block": 0}}}',
        '{"steps": 1, "highest": 448, "layers": {"linear": {"input_scale": 1, "mean": 1, "block": 33}}}',
        '{"steps": 1, "highest": 448, "layers": [1]}',
    ],
)
def test_a_file_without_sound_scales_is_refused(tmp_path: Path, text: str):
    (tmp_path / fp8_file.FILE).write_text(text)
    with pytest.raises(CheckpointError, match="does not hold scales") as e:
        fp8_file.load(tmp_path)
    assert e.value.fix


def test_a_checkpoint_without_scales_is_refused(model: Two, tmp_path: Path):
    with pytest.raises(CheckpointError, match="no scales of FP8 training") as e:
        model.scales().restore(tmp_path)
    assert "fp8_force_clear_state" in str(e.value.fix)
