"""cuDNN's attention on packed documents, through the optional package nvidia-cudnn-frontend. For packed_attention.py.

One plan serves every pack of a size: room for so many documents (the rest have length zero) and a longest one; what a
pack's documents are is read from the device. T tokens, N heads, D head_dim, S documents a plan has room for.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from erniekit.log import warn_once

PACKAGE = "nvidia-cudnn-frontend"


@functools.cache
def library() -> Any:
    """The package, or None where it is not installed or finds no cuDNN."""
    try:
        cudnn = importlib.import_module("cudnn")
        return cudnn if cudnn.backend_version() >= 90600 else None
    except Exception:  # its own loader raises whatever the missing library makes it raise
        return None


class PackShape(NamedTuple):
    """What a plan is made for. Widths are those of the rows the heads lie in, in elements."""

    documents: int
    longest: int
    longest_keys: int
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    q_width: int
    kv_width: int
    dtype: torch.dtype
    lower_right: bool


def bucket(size: int, least: int, most: int) -> int:
    """Rounded up to one of four steps an octave: few plans in a run, and little work for places that stay empty."""
    step = max(least, 1 << max(0, (size - 1).bit_length() - 3))
    return min(-(-size // step) * step, most)


def offsets_fit(shape: PackShape) -> bool:
    """Whether every offset is a number in int32: of heads 64 x 128 wide up to 262,143 tokens."""
    queries = max(shape.q_width, shape.heads * shape.head_dim)
    return max(shape.tokens * queries, shape.keys * shape.kv_width) < 2**31


class Offsets(NamedTuple):
    """Where documents begin, in elements of each tensor, and how long they are: int32 on the device."""

    q_lengths: torch.Tensor
    kv_lengths: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    stats: torch.Tensor


def offsets(bounds: torch.Tensor, key_bounds: torch.Tensor | None, shape: PackShape) -> Offsets:
    """bounds, key_bounds int32 [at least documents + 1], in tokens. key_bounds None: every document's own."""
    bounds = bounds[: shape.documents + 1]
    key_bounds = bounds if key_bounds is None else key_bounds[: shape.documents + 1]
    # Of q, out and stats, all by the queries' bounds.
    widths = _widths((shape.q_width, shape.heads * shape.head_dim, shape.heads), bounds.device)
    q, out, stats = (bounds[None] * widths).unbind(0)
    return Offsets(bounds.diff(), key_bounds.diff(), q, key_bounds * shape.kv_width, out, stats)


@functools.cache
def _widths(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(widths, dtype=torch.int32, device=device)[:, None]


class Plan:
    """A graph that cuDNN built, with the numbers its tensors go by."""

    def __init__(self, graph: Any) -> None:
        cudnn = library()
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph, self.room = graph, graph.get_workspace_size()

    def run(self, memory: dict[int, int], device: torch.device) -> None:
        workspace = torch.empty(max(1, self.room), dtype=torch.uint8, device=device)
        self.graph.execute(memory, workspace.data_ptr(), handle=handle(device))


def handle(device: torch.device) -> Any:
    """The device's handle, set to the stream of now."""
    made = _handle(device)
    library().set_stream(handle=made, stream=torch.cuda.current_stream(device).cuda_stream)
    return made


@functools.cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return library().create_handle()


# The numbers of the tensors in a graph.
Q, K, V, OUT, STATS, D_OUT, D_Q, D_K, D_V, Q_LEN, KV_LEN, Q_AT, KV_AT, OUT_AT, STATS_AT = range(1, 16)


class _Graph:
    """A graph's tensors, described once for both directions."""

    def __init__(self, shape: PackShape, device: torch.device) -> None:
        self.cudnn, self.shape = library(), shape
        kinds = self.cudnn.data_type
        self.io = kinds.BFLOAT16 if shape.dtype == torch.bfloat16 else kinds.HALF
        self.graph = self.cudnn.pygraph(
            io_data_type=self.io,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=handle(device),
        )

    def lengths(self, uid: int) -> Any:
        dim = [self.shape.documents, 1, 1, 1]
        return self.graph.tensor(
            name=f"t{uid}", dim=dim, stride=[1, 1, 1, 1], data_type=self.cudnn.data_type.INT32
        ).set_uid(uid)

    def offsets(self, uid: int) -> Any:
        dim = [self.shape.documents + 1, 1, 1, 1]
        return self.graph.tensor(
            name=f"t{uid}", dim=dim, stride=[1, 1, 1, 1], data_type=self.cudnn.data_type.INT32
        ).set_uid(uid)

    def layout(self, keys: bool, width: int, heads: int, channels: int) -> tuple[list[int], list[int]]:
        s = self.shape
        length = s.longest_keys if keys else s.longest
        return [s.documents, heads, length, channels], [length * width, channels, width, 1]

    def heads(self, uid: int, keys: bool, width: int, ragged: Any) -> Any:
        s = self.shape
        dim, stride = self.layout(keys, width, s.kv_heads if keys else s.heads, s.head_dim)
        tensor = self.graph.tensor(name=f"t{uid}", dim=dim, stride=stride, data_type=self.io)
        return tensor.set_uid(uid).set_ragged_offset(ragged)

    def stats(self, tensor: Any, ragged: Any) -> Any:
        dim, stride = self.layout(False, self.shape.heads, self.shape.heads, 1)
        tensor.set_uid(STATS).set_data_type(self.cudnn.data_type.FLOAT)
        return tensor.set_dim(dim).set_stride(stride).set_ragged_offset(ragged)

    def common(self) -> dict[str, Any]:
        s = self.shape
        align = self.cudnn.diagonal_alignment
        return dict(
            attn_scale=s.head_dim**-0.5,
            use_padding_mask=True,
            seq_len_q=self.lengths(Q_LEN),
            seq_len_kv=self.lengths(KV_LEN),
            diagonal_alignment=align.BOTTOM_RIGHT if s.lower_right else align.TOP_LEFT,
            diagonal_band_right_bound=0,
        )


@functools.cache
def forward_plan(shape: PackShape, device: torch.device) -> Plan:
    g = _Graph(shape, device)
    s = shape
    q_at, kv_at, out_at, stats_at = (g.offsets(uid) for uid in (Q_AT, KV_AT, OUT_AT, STATS_AT))
    out, stats = g.graph.sdpa(
        q=g.heads(Q, False, s.q_width, q_at),
        k=g.heads(K, True, s.kv_width, kv_at),
        v=g.heads(V, True, s.kv_width, kv_at),
        generate_stats=True,
        **g.common(),
    )
    dim, stride = g.layout(False, s.heads * s.head_dim, s.heads, s.head_dim)
    out.set_output(True).set_uid(OUT).set_dim(dim).set_stride(stride).set_ragged_offset(out_at)
    g.stats(stats.set_output(True), stats_at)
    return Plan(g.graph)


@functools.cache
def backward_plan(shape: PackShape, device: torch.device) -> Plan:
    g = _Graph(shape, device)
    s = shape
    q_at, kv_at, out_at, stats_at = (g.offsets(uid) for uid in (Q_AT, KV_AT, OUT_AT, STATS_AT))
    out_width = s.heads * s.head_dim
    dim, stride = g.layout(False, s.heads, s.heads, 1)
    stats = g.graph.tensor(name="stats", dim=dim, stride=stride, data_type=g.cudnn.data_type.FLOAT)
    grads = g.graph.sdpa_backward(
        q=g.heads(Q, False, s.q_width, q_at),
        k=g.heads(K, True, s.kv_width, kv_at),
        v=g.heads(V, True, s.kv_width, kv_at),
        o=g.heads(OUT, False, out_width, out_at),
        dO=g.heads(D_OUT, False, out_width, out_at),
        stats=g.stats(stats, stats_at),
        max_total_seq_len_q=s.tokens,
        max_total_seq_len_kv=s.keys,
        **g.common(),
    )
    for uid, keys, grad in zip((D_Q, D_K, D_V), (False, True, True), grads):
        dim, stride = g.layout(keys, s.kv_width if keys else s.q_width, s.kv_heads if keys else s.heads, s.head_dim)
        grad.set_output(True).set_uid(uid).set_dim(dim).set_stride(stride)
        grad.set_ragged_offset(kv_at if keys else q_at)
    return Plan(g.graph)


@functools.cache
def supported(shape: PackShape, device: torch.device) -> bool:
    """Whether cuDNN has plans for both directions; checked in each, so that both go the same way."""
    if not offsets_fit(shape):
        warn_once("packed attention: too many tokens for offsets in int32, FlashAttention is used instead of cuDNN")
        return False
    try:
        forward_plan(shape, device), backward_plan(shape, device)
    except Exception as problem:  # one of its own kinds, or a library that is too old for the call
        warn_once(f"packed attention: cuDNN has no plan for {shape}, FlashAttention is used ({problem})")
        return False
    return True


def _given(where: Offsets) -> dict[int, int]:
    names = (Q_LEN, KV_LEN, Q_AT, KV_AT, OUT_AT, STATS_AT)
    return {uid: tensor.data_ptr() for uid, tensor in zip(names, where)}


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    where: Offsets,
    s: PackShape,
) -> None:
    """q [T, N, D], k, v [keys, Nkv, D] as views of their rows -> out [T, N * D], stats fp32 [T, N]."""
    memory = {Q: q.data_ptr(), K: k.data_ptr(), V: v.data_ptr(), OUT: out.data_ptr(), STATS: stats.data_ptr()}
    forward_plan(s, q.device).run(memory | _given(where), q.device)


def backward(
    given: tuple[torch.Tensor, ...], out: torch.Tensor, stats: torch.Tensor, grad_out: torch.Tensor,
    grads: tuple[torch.Tensor, ...], where: Offsets, s: PackShape,
) -> None:  # fmt: skip
    """given: q, k, v as in `forward`; grads: memory for theirs, laid out as they are."""
    memory = {OUT: out.data_ptr(), STATS: stats.data_ptr(), D_OUT: grad_out.data_ptr()}
    memory |= {uid: t.data_ptr() for uid, t in zip((Q, K, V, D_Q, D_K, D_V), (*given, *grads))}
    backward_plan(s, out.device).run(memory | _given(where), out.device)
