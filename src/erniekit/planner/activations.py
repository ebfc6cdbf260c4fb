"""What a decoder layer keeps of a token from forward to backward, and what it takes while backward is in it. No torch.

Of the fused kernels: each op of a compiled layer keeps its inputs, norms and activations are formed again. Of the plain
path (no Triton on the device) every intermediate stays. docs/planner.md compares both with counted bytes.
Names: H hidden, I width of a dense MLP, W of an expert, K choices, R LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.models.config import DecoderConfig

LSE = 4  # bytes of a row's log-sum-exp in attention, per head
ROUTED = 24  # bytes a choice: its id, its row, its place, its weight and that weight's gradient


@dataclass(frozen=True)
class ActivationCuts:
    """How the axes of a layout cut what a rank keeps. rows: of each expert's tokens, over the balanced number."""

    tp: int = 1
    sequence_parallel: bool = False
    experts_cut: int = 1  # ranks that one expert is cut over
    rows: float = 1.0


@dataclass(frozen=True)
class LayerKernels:
    """Which path computes layers. bytes: of a number that is computed with."""

    fused: bool = True
    rank: int = 0  # of LoRA pairs; 0: none
    bytes: int = 2
    rows_fp8: bool = False  # experts multiply rows rounded to fp8


UNCUT = ActivationCuts()
FUSED = LayerKernels()


def kept(c: DecoderConfig, sparse: bool, cuts: ActivationCuts = UNCUT, kernels: LayerKernels = FUSED) -> float:
    """Bytes a token of a layer that is not recomputed."""
    H, D, tp, r = c.hidden_size, c.head_dim, cuts.tp, kernels.rank
    wide = H / tp if cuts.sequence_parallel else H  # what lies between the matrices
    heads, kv = c.num_heads / tp, max(1.0, c.num_kv_heads / tp)
    attention = (2 * heads + 2 * kv) * D + 4 * r  # q, k, v and the output; low ranks of q, k, v, o
    between = 4 * wide if kernels.fused else 8 * wide  # residuals and normed inputs; plain: both in fp32 as well
    if not kernels.fused:
        attention += (heads + kv) * D  # q and k before positions are turned
    values = between + attention
    m = c.moe
    plain = 0 if kernels.fused else 1  # silu of the gate
    if m is None or not sparse:
        values += (3 + plain) * c.intermediate_size / tp + 3 * r
        return kernels.bytes * values + LSE * heads
    rows = m.choices * cuts.rows
    values += (3 + plain) * m.shared_width / tp + (3 * r if m.shared_width else 0)
    values += rows * (2 * m.width / cuts.experts_cut + 3 * r)
    if not kernels.fused:
        values += 2 * H  # the router's input in fp32
    return kernels.bytes * values + LSE * heads + ROUTED * rows + 8 * m.experts


def start(c: DecoderConfig, cuts: ActivationCuts = UNCUT, kernels: LayerKernels = FUSED) -> float:
    """Bytes a token that a recomputed layer keeps: its input."""
    return kernels.bytes * c.hidden_size / (cuts.tp if cuts.sequence_parallel else 1)


def part_kept(c: DecoderConfig, sparse: bool, granularity: str, cuts: ActivationCuts, kernels: LayerKernels) -> float:
    """The same with a part of the layer recomputed: full, full_attn, core_attn (selective)."""
    if granularity == "full":
        return start(c, cuts, kernels)
    whole = kept(c, sparse, cuts, kernels)
    heads, kv = c.num_heads / cuts.tp, max(1.0, c.num_kv_heads / cuts.tp)
    if granularity == "full_attn":
        return whole - kernels.bytes * (2 * heads + 2 * kv) * c.head_dim - LSE * heads
    return whole - LSE * heads


def working(c: DecoderConfig, sparse: bool, cuts: ActivationCuts = UNCUT, kernels: LayerKernels = FUSED) -> float:
    """Bytes a token that backward of one layer holds at its widest, besides what forward kept: the gradients of an
    MLP's two wide tensors and what is formed again for them; or attention's fp32 sums, where those are more."""
    H, tp = c.hidden_size, cuts.tp
    m = c.moe
    if m is None or not sparse:
        mlp = kernels.bytes * (3 * c.intermediate_size / tp + 2 * H)
    else:
        # Of a row: its output's gradient, its input formed again, the output that its weight's gradient takes, and the
        # gradient that goes on; without our kernels two of them at a time, in fp8 two of one byte.
        wide = 2.0 * H if kernels.rows_fp8 else (4.0 if kernels.fused else 2.0) * H * kernels.bytes
        rows = m.choices * cuts.rows
        mlp = rows * (kernels.bytes * 3 * m.width / cuts.experts_cut + wide) + kernels.bytes * 2 * H
        mlp = max(mlp, kernels.bytes * (3 * m.shared_width / tp + 3 * H))
    attention = (4 + 2 * kernels.bytes) * c.num_heads / tp * c.head_dim + kernels.bytes * 2 * H
    return float(max(mlp, attention))
