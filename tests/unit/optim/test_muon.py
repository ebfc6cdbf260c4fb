"""Muon beside AdamW against torch.optim.Muon and torch.optim.AdamW on the same matrices stored apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from erniekit.kernels.newton_schulz import orthogonalised
from erniekit.optim.groups import make_groups
from erniekit.optim.muon import Muon, MuonSettings
from erniekit.optim.muon_names import by_muon

WIDTH = 24
# our fused tensor -> the rows of its matrices; two experts of (10, 10)
MATRICES = {
    "layers.0.attn.qkv.weight": (32, 8, 8),
    "layers.0.mlp.experts.gate_up.weight": (10, 10),
    "layers.0.mlp.down.weight": (WIDTH,),
}
SHAPES = {
    "embed.weight": (50, WIDTH),
    "layers.0.attn.qkv.weight": (48, WIDTH),
    "layers.0.mlp.experts.gate_up.weight": (40, WIDTH),
    "layers.0.mlp.down.weight": (WIDTH, 20),
    "layers.0.mlp.router.weight": (2, WIDTH),
    "layers.0.attn_norm.weight": (WIDTH,),
}


class Alone:
    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return piece

    def piece(self, name: str, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return whole


def make(values: dict[str, torch.Tensor], settings: MuonSettings, **options: object) -> Muon:
    named = [(name, nn.Parameter(value.clone())) for name, value in values.items()]
    return Muon(
        make_groups(named, 1, 0.1), (0.9, 0.95), 1e-8, matrices=MATRICES, settings=settings, spread=Alone(), **options
    )


def start() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.1 for name, shape in SHAPES.items()}


def gradients(steps: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(steps)]


def pieces(name: str, value: torch.Tensor) -> list[torch.Tensor]:
    parts = MATRICES[name]
    return list(value.split(list(parts) * (len(value) // sum(parts))))


@pytest.mark.parametrize("match", [True, False])
def test_matrices_follow_torchs_muon_and_all_else_torchs_adamw(match: bool) -> None:
    values, ours = start(), make(start(), MuonSettings(match_adamw=match))
    apart = {name: [nn.Parameter(p.clone()) for p in pieces(name, values[name])] for name in MATRICES}
    others = {name: nn.Parameter(v.clone()) for name, v in values.items() if name not in MATRICES}
    muon = torch.optim.Muon(
        [p for parts in apart.values() for p in parts], lr=0.02, weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw" if match else "original",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.0 if "norm" in n else 0.1} for n, p in others.items()],
        lr=0.02, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for grads in gradients(4):
        for name, grad in grads.items():
            ours.params[name].grad = grad.clone()
            if name in apart:
                for param, piece in zip(apart[name], pieces(name, grad), strict=True):
                    param.grad = piece.clone()
            else:
                others[name].grad = grad.clone()
        ours.step(0.02)
        muon.step()
        adamw.step()
    for name, param in ours.params.items():
        want = torch.cat([p.detach() for p in apart[name]]) if name in apart else others[name].detach()
        # Products of bf16 numbers, added in another order where matrices are multiplied several at once.
        torch.testing.assert_close(param.detach(), want, atol=2e-4 if name in apart else 1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_directions_are_nearly_orthogonal_whatever_the_shape(dtype: torch.dtype) -> None:
    for rows, columns in ((40, 16), (16, 40), (24, 24)):
        directions = orthogonalised(torch.randn(3, rows, columns).to(dtype))
        assert directions.dtype == dtype
        found = torch.linalg.svdvals(directions.float())
        assert float(found.min()) > 0.5
        assert float(found.max()) < 1.3


def test_a_matrix_without_gradient_stays_finite() -> None:
    ours = make(start(), MuonSettings())
    for param in ours.params.values():
        param.grad = torch.zeros_like(param)
    ours.step(0.1)
    assert all(bool(p.isfinite().all()) for p in ours.params.values())


def test_its_state_is_half_of_adamws_for_matrices_and_comes_back_bit_for_bit() -> None:
    ours, again = make(start(), MuonSettings()), make(start(), MuonSettings())
    first, second, third = gradients(3)

    def step(optimizer: Muon, grads: dict[str, torch.Tensor]) -> None:
        for name, grad in grads.items():
            optimizer.params[name].grad = grad.clone()
        optimizer.step(0.02)

    step(ours, first)
    step(ours, second)
    state = dict(ours.state_tensors())
    assert {key for key in state if "qkv" in key} == {"layers.0.attn.qkv.weight/momentum"}
    counts = {name: value.numel() for name, value in ours.params.items()}
    want = sum((4 if name in MATRICES else 8) * n for name, n in counts.items()) / sum(counts.values())
    assert ours.bytes_a_weight == pytest.approx(want)
    with torch.no_grad():
        for name, param in again.params.items():
            param.copy_(ours.params[name])
    assert again.load(2, state, {}) == []
    step(ours, third)
    step(again, third)
    for name, param in ours.params.items():
        assert torch.equal(param, again.params[name]), name
    assert again.load(2, {}, {})[1] == "layers.0.attn.qkv.weight/momentum", "what is missing is named"


def test_sixteen_bit_weights_have_fp32_masters_and_a_bad_step_changes_nothing() -> None:
    ours = make({name: value.bfloat16() for name, value in start().items()}, MuonSettings())
    name = "layers.0.mlp.down.weight"
    before = ours.masters[name].clone()
    ours.params[name].grad = torch.randn(SHAPES[name]).bfloat16()
    grad = ours.gradients()[name]
    ours._update([name], [grad], ours._rates(ours.group_of[name], 0.02), good=torch.zeros(()))
    assert torch.equal(ours.masters[name], before)
    ours._update([name], [grad], ours._rates(ours.group_of[name], 0.02), good=torch.ones(()))
    assert not torch.equal(ours.masters[name], before)
    assert torch.equal(ours.params[name].detach(), ours.masters[name].bfloat16())


def test_muon_takes_the_matrices_inside_layers_alone() -> None:
    taken = [name for name, shape in SHAPES.items() if by_muon(name, shape)]
    assert taken == list(MATRICES)
    assert not by_muon("head.weight", (50, WIDTH))
    assert by_muon("mtp.0.proj.weight", (WIDTH, 2 * WIDTH))
