"""The most a rank of each pipeline stage holds at once, by what it is, from the moments of a step that may be the most.

Moments: the loss (all activations, logits, no gradient yet), the first layer of backward, the first one that is
computed again, the last one (all gradients), the update. Called by evaluate.py and recipes/memory_decisions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from erniekit.models.config import DecoderConfig
from erniekit.planner.activations import FUSED, UNCUT, ActivationCuts, LayerKernels, kept, part_kept, start, working

GIB = 1024**3
WORKSPACE = 0.5 * GIB  # of products, attention and small tensors on an accelerator: fitted to peaks of docs/planner.md
USABLE = 0.92  # of a card's memory: the allocator's rounding and other libraries take the rest
ROUNDING = 1.02  # blocks of the allocator over the requested bytes
FLAT = 64 * 1024 * 1024 * 4.0  # bytes of gradients that are summed over ranks in one call


class PeakBytes(NamedTuple):
    """Of one rank, in bytes, at the moment of a step that takes the most."""

    weights: float = 0.0
    gradients: float = 0.0
    optimiser: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    experts: float = 0.0  # rows of routed experts: what activations of a layer are more because of them
    communication: float = 0.0
    workspace: float = 0.0
    rounding: float = 0.0  # of the allocator's blocks

    @property
    def allocated(self) -> float:
        """What a run's peak counts."""
        return self.total - self.rounding

    @property
    def total(self) -> float:  # written out: `sum` adds in another way from Python 3.12 on
        return (
            self.weights + self.gradients + self.optimiser + self.activations + self.logits + self.experts
            + self.communication + self.workspace + self.rounding
        )  # fmt: skip

    def shown(self) -> dict[str, float]:
        return {name: value / GIB for name, value in zip(self._fields, self)} | {"total": self.total / GIB}


class HeldBytes(NamedTuple):
    """What a rank holds whatever it computes, and how gradients come to be. In bytes."""

    weights: float  # as stored, packed or not
    optimiser: float  # masters and moments on the device
    gradients: float  # of all trained weights, as they are kept until the update
    layer_gradients: float  # of the largest layer, as backward forms them
    gathered: float = 0.0  # weights of others, gathered while they are computed with
    head_gradient: float = 0.0  # the head's, summed in fp32 while the loss forms it; 0: frozen or elsewhere
    from_start: bool = False  # a second micro-batch adds to the gradients of the first
    unpacked: float = 0.0  # the largest packed weight while it is multiplied by
    buffers: float = 0.0  # of collectives
    away: float = 0.0  # in host memory
    staged: float = 0.0  # of states in host memory those that are on the device at once during the update


@dataclass(frozen=True)
class RankWork:
    """What a rank computes. layers: whether each one of its layers has experts, in order."""

    layers: tuple[bool, ...]
    tokens: int  # of a micro-batch, as this rank has them
    again: tuple[str, ...] = ()  # of each layer: how it is recomputed; empty: kept whole
    in_flight: float = 1.0  # micro-batches between forward and backward at the most
    head_rows: int = 0  # rows of logits at once; 0: no head here
    head_tokens: int = 0  # of a micro-batch, that reach the head
    vocabulary: int = 0  # columns of the head here
    pairs: bool = False  # DPO: the head's gradient waits for both answers
    cuts: ActivationCuts = UNCUT
    kernels: LayerKernels = field(default_factory=lambda: FUSED)
    vision_kept: float = 0.0  # bytes that a vision tower and its resampler keep of a micro-batch, where they are here
    compared: float = 0.0  # bytes of a teacher's states and of both models' logits while the loss is formed


class KeptBytes(NamedTuple):
    """What layers keep of one micro-batch, in bytes."""

    all: float  # from forward to backward, of all layers
    first: float  # of the first layer
    inside: float  # the most that backward of one layer takes besides what is kept
    last_inside: float  # what backward of the last layer takes, where it begins
    redone: float  # kept of the layers up to the last one that is computed again
    done: float  # share of the layers after that one


# Bytes of gradients, of the optimiser's states, of activations, of logits. Numbers rather than `PeakBytes`, of which a
# search would make hundreds of thousands to read their totals.
Parts = tuple[float, float, float, float]
Moment = Callable[[DecoderConfig, HeldBytes, RankWork, KeptBytes], Parts]


class WeighedWork(NamedTuple):
    """Work and what its layers keep; also without rows of routed experts, where there are some."""

    work: RankWork
    kept: KeptBytes
    unrouted: tuple[RankWork, KeptBytes] | None


def counted(c: DecoderConfig, work: RankWork) -> WeighedWork:
    unrouted = None
    if any(work.layers):
        without = replace(work, cuts=replace(work.cuts, rows=0.0))
        unrouted = without, _kept(c, without)
    return WeighedWork(work, _kept(c, work), unrouted)


def step_bytes(c: DecoderConfig, held: HeldBytes, work: RankWork) -> PeakBytes:
    """At the moment that takes the most."""
    return bytes_of(c, held, counted(c, work))


def bytes_of(c: DecoderConfig, held: HeldBytes, work: WeighedWork) -> PeakBytes:
    _, (gradients, optimiser, activations, logits), moment = _fullest(c, held, work.work, work.kept)
    routed = 0.0
    if work.unrouted is not None:
        routed = max(0.0, activations - moment(c, held, *work.unrouted)[2])
    return PeakBytes(
        _weights(held), gradients, optimiser, activations - routed, logits, experts=routed,
        communication=held.buffers, workspace=WORKSPACE,
    )  # fmt: skip


def rounded(found: PeakBytes) -> PeakBytes:
    """With what the allocator's blocks are larger."""
    return PeakBytes(
        found.weights, found.gradients, found.optimiser, found.activations, found.logits, found.experts,
        found.communication, found.workspace, (ROUNDING - 1) * found.total,
    )  # fmt: skip


def peak(c: DecoderConfig, held: HeldBytes, work: RankWork) -> float:
    """Only the total, for a search."""
    return _fullest(c, held, work, _kept(c, work))[0]


def peak_of(c: DecoderConfig, held: HeldBytes, work: WeighedWork) -> float:
    return _fullest(c, held, work.work, work.kept)[0]


def _fullest(c: DecoderConfig, held: HeldBytes, work: RankWork, kept_here: KeptBytes) -> tuple[float, Parts, Moment]:
    """The total of the moment that takes the most, what it is made of, and the moment."""
    weights, buffers = _weights(held), held.buffers
    most = -1.0
    for moment in MOMENTS:
        parts = moment(c, held, work, kept_here)
        gradients, optimiser, activations, logits = parts
        total = (
            weights + gradients + optimiser + activations + logits + buffers + WORKSPACE
        )  # in the order of PeakBytes
        if total > most:
            most, found = total, (parts, moment)
    return most, *found


def _weights(held: HeldBytes) -> float:
    return held.weights + held.gathered + held.unpacked


def _kept(c: DecoderConfig, work: RankWork) -> KeptBytes:
    """Like layers are counted once. A layer that is computed again has all of itself while backward is in it."""
    layers = list(zip(work.layers, work.again or ("",) * len(work.layers), strict=True))
    if not layers:
        return KeptBytes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    each, inside = {}, {}
    for sparse, how in dict.fromkeys(layers):
        whole = kept(c, sparse, work.cuts, work.kernels)
        each[sparse, how] = part_kept(c, sparse, how, work.cuts, work.kernels) if how else whole
        inside[sparse, how] = working(c, sparse, work.cuts, work.kernels)
        if how == "full":
            inside[sparse, how] += whole - start(c, work.cuts, work.kernels)
    redone = len(work.again) - work.again.count("")  # the first ones
    ended = set(layers[redone:]) or {layers[-1]}
    tokens = work.tokens
    return KeptBytes(
        all=tokens * _sum(each, layers),
        first=tokens * each[layers[0]],
        inside=tokens * max(inside.values()),
        last_inside=tokens * max([inside[kind] for kind in ended]),
        redone=tokens * _sum(each, layers[:redone]),
        done=1 - redone / len(layers),
    )


def _sum(each: dict[tuple[bool, str], float], layers: list[tuple[bool, str]]) -> float:
    return sum([layers.count(kind) * size for kind, size in each.items()])


def _at_loss(c: DecoderConfig, held: HeldBytes, work: RankWork, layers: KeptBytes) -> Parts:
    before = held.gradients if held.from_start else 0.0
    hidden = 2.0 * c.hidden_size * work.kernels.bytes * work.tokens  # the last layer's output, and its gradient
    logits = 0.0
    if work.head_rows:
        rows = min(work.head_rows, max(1, work.head_tokens))
        # Softmax turns logits into their gradient in place; without Triton it makes fp32 copies.
        logits = rows * work.vocabulary * (work.kernels.bytes if work.kernels.fused else 12.0)
        logits += held.head_gradient + c.hidden_size * work.kernels.bytes * 2.0 * work.head_tokens
    activations = work.in_flight * (layers.all + work.vision_kept) + hidden
    return before, held.optimiser, activations, logits + work.compared


def _at_first(c: DecoderConfig, held: HeldBytes, work: RankWork, layers: KeptBytes) -> Parts:
    before = held.gradients if held.from_start else 0.0
    hidden = c.hidden_size * work.kernels.bytes * work.tokens
    activations = work.in_flight * (layers.all + work.vision_kept) + hidden + layers.last_inside
    gradients = before + held.layer_gradients + held.head_gradient / 2
    return gradients, held.optimiser, activations, 0.0


def _at_first_again(c: DecoderConfig, held: HeldBytes, work: RankWork, layers: KeptBytes) -> Parts:
    """Where backward comes to the layers that are computed again: those after them keep nothing any more."""
    before = held.gradients if held.from_start else held.gradients * layers.done
    hidden = c.hidden_size * work.kernels.bytes * work.tokens
    others = (work.in_flight - 1) * layers.all + work.in_flight * work.vision_kept
    activations = others + layers.redone + hidden + layers.inside
    gradients = before + held.layer_gradients + held.head_gradient / 2
    return gradients, held.optimiser, activations, 0.0


def _at_last(c: DecoderConfig, held: HeldBytes, work: RankWork, layers: KeptBytes) -> Parts:
    rest = max(0.0, work.in_flight - 1) * layers.all + layers.first
    extra = held.layer_gradients if held.from_start else 0.0
    return held.gradients + extra, held.optimiser, rest + work.in_flight * work.vision_kept + layers.inside, 0.0


def _at_update(c: DecoderConfig, held: HeldBytes, work: RankWork, layers: KeptBytes) -> Parts:
    return held.gradients, held.optimiser + held.staged, 0.0, 0.0


MOMENTS: tuple[Moment, ...] = (_at_loss, _at_first, _at_first_again, _at_last, _at_update)


def fewest_recomputed(c: DecoderConfig, held: HeldBytes, work: RankWork, limit: float) -> int:
    """How many layers, the first ones, must be computed again for a step to fit `limit` bytes; all, where none do."""
    count = len(work.layers)
    for number in range(count + 1):
        if peak(c, held, recomputing(work, number)) <= limit:
            return number
    return count


def recomputing(work: RankWork, number: int, how: str = "full") -> RankWork:
    again = ("",) * len(work.layers) if not number else _first(len(work.layers), number, how)
    return replace(work, again=again if number else ())


def _first(count: int, number: int, how: str) -> tuple[str, ...]:
    return (how,) * number + ("",) * (count - number)


def layers_of(c: DecoderConfig, numbers: Sequence[int] | None = None) -> tuple[bool, ...]:
    return tuple(c.sparse(n) for n in (range(c.num_layers) if numbers is None else numbers))
