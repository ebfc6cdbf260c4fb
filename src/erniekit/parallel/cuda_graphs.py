"""Decoder layers replayed as CUDA graphs: where a step is so short that the host's launches would take longer than the
device's work. Used by apply.py. Embedding, head and loss stay outside: how many tokens are trained differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.kernels.packed_attention import Packs
from erniekit.log import emit
from erniekit.model_contract import SpreadModel
from erniekit.parallel.compiled import is_eager

KINDS = 2  # of batches of one length that are recorded: rows of one document and packs
SHARES = 16  # of a batch: to so many parts the counts of its text and vision tokens are rounded up
LAUNCHED = 2  # steps of a large model before it is recorded: they measure what its activations and its optimiser take
GIB = 1024**3
PER_BATCH = (
    "cos",
    "sin",
    "cu_seqlens",
    "real",
    "packs",
    "shared",
    "members",
    "modality",
)  # of Context: inputs of a replay


class Graphed(NamedTuple):
    """Of the batches to come: rows, the lengths these may have, and micro-batches a step."""

    rows: int
    lengths: tuple[int, ...]
    micro_batches: int


class GraphedLayers:
    """In place of a model's `run_layers`. What it cannot replay runs as before: other shapes, evaluation, a reference's
    passes without gradients, documents that share keys where no kernel takes their lists.

    All recordings share their memory, so that several lengths take little more than the longest. That is right as long
    as each forward pass is followed by its own backward pass: the next replay may write over what it kept."""

    def __init__(self, model: SpreadModel, device: Device, batches: Graphed) -> None:
        """A replay writes gradients where the one before wrote them, so that each of several micro-batches' is copied
        first."""
        self.model, self.device, self.plain = model, device, model.run_layers
        self.rows, self.lengths, self.micro_batches = batches
        self.most = max(KINDS, len(self.lengths))
        if model.config.vision is not None:  # by how many tokens are text
            self.most = max(self.most, SHARES // 2)
            model.length_step = max(1, self.rows * max(self.lengths) // SHARES)
        self.recorded: dict[Any, Any] = {}
        self.launched, self.room = 0, True
        self._pool: Any = None  # the memory they share, once there is one
        self._copied: list[Any] = []  # hooks that copy gradients

    def __call__(self, x_BLH: torch.Tensor, ctx: Any) -> torch.Tensor:
        result: torch.Tensor
        if not self._fits(x_BLH, ctx):
            result = self.plain(x_BLH, ctx)
            return result
        shapes = tuple(None if tensor is None else tensor.shape for tensor in (x_BLH, *_per_batch(ctx)))
        counts = None if ctx.lengths is None else tuple(len(one) for one in ctx.lengths)
        key = (ctx.kernel, shapes, ctx.record is None, counts)
        if key not in self.recorded:
            if len(self.recorded) == self.most or not self._may_record():
                result = self.plain(x_BLH, ctx)
                return result
            self.recorded[key] = self._record(x_BLH, ctx)
        stack = self.recorded[key]
        out, *records = stack(x_BLH, *_inputs(ctx))
        if ctx.record is not None:
            ctx.record.update(stack.read(records))
        result = out
        return result

    def _fits(self, x_BLH: torch.Tensor, ctx: Any) -> bool:
        if not (torch.is_grad_enabled() and self.model.training) or is_eager():
            return False
        if x_BLH.shape[0] != self.rows or x_BLH.shape[1] not in self.lengths:
            return False
        if ctx.shared is not None and ctx.packs is None:
            return False
        if self.model.config.vision is not None and ctx.lengths is None:  # text alone: its vision experts have no rows
            return False
        inners = [layer.attn.inner for layer in self.model.layers]
        return all(inner.takes(x_BLH.dtype, ctx) for inner in inners)

    def _may_record(self) -> bool:
        """Recording rehearses in ordinary memory what it then keeps in memory of its own: a step's activations twice.
        Without room for them a capture would fail halfway, after which nothing can be recorded or drawn by chance."""
        if self.model.config.moe is None and not self.recorded:
            return True
        if self.model.config.moe is not None and self.launched < LAUNCHED * self.micro_batches:
            self.launched += 1
            return False
        if self.room:
            held = self.device.allocated()
            need = 2 * (self.device.peak_allocated() - held)
            free = self.device.free_memory()[0] + self.device.reserved() - held
            self.room = need < free
            if not self.room:
                emit(f"note     cuda_graph: recording takes {need / GIB:.0f} GiB, {free / GIB:.0f} are free: launched")
        return self.room

    def _record(self, x_BLH: torch.Tensor, ctx: Any) -> nn.Module:
        stack: Any = _Stack(self.model.layers, ctx)
        x = x_BLH.detach().clone().requires_grad_(x_BLH.requires_grad)
        self.device.empty_cache()  # what was launched so far left its memory behind
        # Recording runs on a stream of its own and keeps its AccumulateGrad nodes, so that every replay on the usual
        # stream would be warned of: as intended here, hence off from now on.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        for hook in self._copied:  # of the recordings before: they would be recorded with this one
            hook.remove()
        if self._pool is None:
            self._pool = self.device.graph_memory()
        stack = self.device.graphed(stack, (x, *(t.clone() for t in _inputs(ctx))), self._pool)
        self.device.empty_cache()  # and so did the rehearsals: a graph cannot use it
        if self.micro_batches > 1:
            trained = (param for param in stack.parameters() if param.requires_grad)
            self._copied = [param.register_hook(torch.Tensor.clone) for param in trained]
        graphed: nn.Module = stack
        return graphed


def _inputs(ctx: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _per_batch(ctx) if tensor is not None]


def _per_batch(ctx: Any) -> list[torch.Tensor | None]:
    """What differs from one batch to the next."""
    return [ctx.cos, ctx.sin, *_of_packs(ctx.packs), _real(ctx), ctx.members, ctx.modality]


def _of_packs(packs: Packs | None) -> list[torch.Tensor | None]:
    """On the device: where documents lie, and the lists of keys that some share."""
    return [None] * 4 if packs is None else [packs.bounds, packs.key_index, packs.key_bounds, packs.key_places]


def _real(ctx: Any) -> torch.Tensor | None:
    """The mask of real tokens, which is read only where layers write records."""
    return None if ctx.record is None else ctx.real


class _Stack(nn.Module):
    """The layers as a function of tensors only; what they record follows their output, a tensor a name."""

    def __init__(self, layers: nn.ModuleList, ctx: Any) -> None:
        super().__init__()
        self.layers = layers
        self.like = ctx._replace(**dict.fromkeys(PER_BATCH))
        self.writes_records, self.padded = ctx.record is not None, _real(ctx) is not None
        self.joined, self.with_vision = ctx.members is not None, ctx.modality is not None
        self.of_packs = sum(tensor is not None for tensor in _of_packs(ctx.packs))  # how many of the inputs
        self.record_layout: dict[str, list[tuple[int, int | None]]] = {}  # name -> (layer, its count where it has one)
        self.sizes = torch.zeros(3, dtype=torch.int64)
        if ctx.packs is not None:
            # A pack to come may have any documents: as many as there is room for, the longest as long as all.
            tokens = ctx.cos.shape[0] * ctx.cos.shape[1]
            self.sizes = torch.tensor([ctx.packs.bounds.numel() - 1, tokens, tokens])

    def forward(self, x_BLH: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin, *rest = inputs
        packed, rest = rest[: self.of_packs], rest[self.of_packs :]
        packs = Packs(packed[0], self.sizes, *packed[1:]) if packed else None
        more = (self.padded, self.joined, self.with_vision)
        real, members, modality = (rest.pop(0) if given else None for given in more)
        ctx = self.like._replace(cos=cos, sin=sin, packs=packs, real=real, members=members, modality=modality)
        sheets: list[dict[str, Any]] = []
        for layer in self.layers:
            sheets.append({})
            x_BLH = layer(x_BLH, ctx._replace(record=sheets[-1]) if self.writes_records else ctx)
        return x_BLH, *self._gathered(sheets)

    def _gathered(self, sheets: list[dict[str, Any]]) -> list[torch.Tensor]:
        values: dict[str, list[torch.Tensor]] = {}
        self.record_layout = {}
        for number, sheet in enumerate(sheets):
            for name, value in sheet.items():
                tensor, count = value if isinstance(value, tuple) else (value, None)
                self.record_layout.setdefault(name, []).append((number, count))
                values.setdefault(name, []).append(tensor.detach())
        return [torch.stack(values[name]) for name in self.record_layout]

    def read(self, records: list[torch.Tensor]) -> Iterator[tuple[tuple[str, int], Any]]:
        """As the layers wrote it: a copy, for the next replay writes there again."""
        for (name, places), stacked in zip(self.record_layout.items(), records):
            for (number, count), tensor in zip(places, stacked.detach().clone()):
                yield (name, number), tensor if count is None else (tensor, count)
