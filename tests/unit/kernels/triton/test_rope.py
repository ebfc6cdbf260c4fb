"""The kernel that turns a fused projection, in Triton's interpreter, against kernels/rope.py."""

from __future__ import annotations

import pytest
import torch

from erniekit.kernels.rope import ROTATIONS, cos_sin, inverse_frequencies

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

from erniekit.kernels.triton import rope


@pytest.mark.parametrize("style", ["pairs", "halves"])
@pytest.mark.parametrize(("B", "L", "heads", "kv_heads"), [(2, 7, 5, 2), (1, 1, 1, 1), (1, 9, 4, 4)])
def test_queries_and_keys_turn_values_stay_and_turning_back_gives_the_projection(
    B: int, L: int, heads: int, kv_heads: int, style: str
) -> None:
    D = 16
    torch.manual_seed(0)
    fused = torch.randn(B, L, (heads + 2 * kv_heads) * D)
    sizes = [heads * D, kv_heads * D, kv_heads * D]
    q, k, v = (t.unflatten(-1, (-1, D)) for t in fused.split(sizes, dim=-1))
    cos, sin = cos_sin(torch.randint(0, 500, (B, L)), inverse_frequencies(D, 1e4, None, torch.device("cpu")))
    flat = [t.reshape(-1, D // 2) for t in (cos, sin)]
    out = torch.full((B * L, fused.shape[-1]), float("nan"))

    rows = out.split(sizes, dim=-1)
    rope.launch(rope.turn, (q, k, v), rows, *flat, style == "halves")

    turn = ROTATIONS[style]
    want = torch.cat([turn(q, cos, sin).flatten(2), turn(k, cos, sin).flatten(2), v.flatten(2)], dim=-1)
    torch.testing.assert_close(out, want.flatten(0, 1))
    back = torch.full_like(out, float("nan"))
    rope.launch(rope.turn_back, [t.view(B, L, -1, D) for t in rows], (back,), *flat, style == "halves")
    torch.testing.assert_close(back, fused.flatten(0, 1))


def test_heads_are_read_where_their_strides_say() -> None:
    B, L, N, D = 2, 5, 2, 8
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, N, L, D).transpose(1, 2) for _ in range(3))  # as torch's attention returns gradients
    angles = torch.randn(B * L, D // 2)
    apart, dense = torch.empty(B * L, 3 * N * D), torch.empty(B * L, 3 * N * D)
    turn = (angles.cos(), angles.sin(), False)
    rope.launch(rope.turn_back, (q, k, v), (apart,), *turn)
    rope.launch(rope.turn_back, [t.contiguous() for t in (q, k, v)], (dense,), *turn)
    assert torch.equal(apart, dense)
