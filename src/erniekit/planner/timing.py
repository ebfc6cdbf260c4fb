"""Seconds of a step: FLOPs by kind over rates, bytes over memory and links, the pipeline by replay.

Constants of element-wise traffic were fitted once to the profiles of docs/performance.md (H200); docs/planner.md has
the error of every recorded run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from erniekit.kernels.stored import bits_of, kind_named
from erniekit.models.config import DecoderConfig
from erniekit.models.costs import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    layer_products,
)
from erniekit.parallel.layout import Layout
from erniekit.planner.cards import CardRates
from erniekit.planner.job import Job
from erniekit.planner.static_bytes import TensorBytes

# Numbers read or written by the passes between products, both ways, per token: of width H, MLP width, heads; of a
# choice's row: H and expert width.
OF_HIDDEN, OF_WIDTH, OF_HEADS = 20, 8, 4
OF_ROW_HIDDEN, OF_ROW_WIDTH = 10, 12
OF_LOGITS = 20  # fp32 numbers that a comparison with a teacher reads and writes for each logit: not fitted, counted
FORWARD_SHARE = 0.4  # of that traffic
# Of attention's time: backward has 2.5 times the products of forward, one of which no count of model FLOPs has, at a
# lower rate.
ATTENTION_FORWARD_SHARE = 0.25
# Over FlashAttention-4, on one H200 (docs/performance.md): FlashAttention-2 of packs (E1 83.8 ms for 44.0), torch's own
# for rows (A1 36.9 for 30.8, C1-85 72.8 for 62.7).
SLOWER_ATTENTION = {"flash": 1.85, "rows": 1.18}
FP8_GAIN = 1.55  # rate of products in fp8 over bf16's
SAME_INPUTS = ("k_proj", "v_proj", "up_proj")  # as the product before: rounded once
ROUNDED_BYTES = 3  # read and written to round a number of a row to fp8
UPDATE_8BIT = 0.5  # of the rate of other updates: with 8-bit moments arithmetic is the limit, not memory
LOW_RANK = 1.2  # a linear with adapters, over the same without
AS_WRITTEN = 4 / 2.3  # launches of a dense layer that is not compiled, over those of one that is


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second that a group's collectives reach, by how far its ranks are apart."""

    rates: CardRates
    devices: int  # of one machine

    def over(self, extent: int) -> float:
        """extent: how many neighbouring ranks the group reaches over."""
        return self.rates.link if extent <= self.devices else self.rates.network

    def reduce(self, size: float, ranks: int, extent: int) -> float:
        """Seconds of an all-reduce; a gather or a scatter is half of it."""
        if ranks < 2 or not size:
            return 0.0
        return 2 * (ranks - 1) / ranks * size / self.over(extent) + self.rates.latency

    def gather(self, size: float, ranks: int, extent: int) -> float:
        return self.reduce(size, ranks, extent) / 2

    def exchange(self, size: float, ranks: int, extent: int) -> float:
        """Of an all-to-all in which every rank sends `size`."""
        if ranks < 2 or not size:
            return 0.0
        return (ranks - 1) / ranks * size / self.over(extent) + self.rates.latency


class LayerTime(NamedTuple):
    forward: float
    backward: float
    host: float  # launches, both ways; none where it is replayed
    reference: float  # launches of a pass without gradients, which is never replayed
    waiting: float  # for collectives, one way


def layer_time(job: Job, sparse: bool, layout: Layout, tokens: int, rates: CardRates, links: LinkRates) -> LayerTime:
    """Of one micro-batch; tokens: of this rank, its part of a sequence that context parallelism cuts."""
    c, tp = job.model, layout.tp
    products = turned = unpacked = rounded = 0.0
    for product in layer_products(c, sparse):
        experts = product.kind == "experts"
        rate = rates.grouped if experts else rates.dense / (LOW_RANK if job.rank else 1.0)
        if job.in_fp8(product.kind):
            rate *= FP8_GAIN
            inputs = 0 if product.name in SAME_INPUTS else product.inputs
            rounded += ROUNDED_BYTES * product.met * (inputs + product.outputs) * tokens / tp
        # Experts too: cut inside, or dealt out so that as many rows come from other ranks as go there.
        products += FORWARD * product.weights_met * tokens / tp / rate
        here = product.weights / (layout.expert_ranks if experts and layout.experts_over != "none" else tp)
        once, twice = unpacking(job, product.kind)
        turned, unpacked = turned + once * here / rates.update, unpacked + twice * here / rates.update
    back = (INPUT_GRADIENT + (0 if job.rank else WEIGHT_GRADIENT)) / FORWARD
    heads = c.num_heads * c.head_dim / tp
    attention = heads * tokens * job.documents / rates.attention_at(job.documents)
    kernel = job.packed_attention if job.documents < job.length else job.attention
    attention *= (ATTENTION_FORWARD + ATTENTION_BACKWARD) * SLOWER_ATTENTION.get(kernel, 1.0)
    traffic = element_bytes(c, sparse, job.compute) * tokens / (tp if layout.sequence_parallel or tp == 1 else 1.0)
    between = (traffic + rounded) / rates.elementwise
    wait = exchanges(job, sparse, layout, tokens, links)
    launches = rates.expert_launch if sparse else rates.layer_launch
    return LayerTime(
        products + unpacked + ATTENTION_FORWARD_SHARE * attention + FORWARD_SHARE * between + wait,
        products * back
        + unpacked
        + turned
        + (1 - ATTENTION_FORWARD_SHARE) * attention
        + (1 - FORWARD_SHARE) * between
        + wait,
        0.0 if job.replayed else launches,
        launches / 3 * (AS_WRITTEN if job.replayed and not sparse else 1.0),
        wait,
    )


def unpacking(job: Job, role: str) -> tuple[float, float]:
    """Bytes that a packed weight takes to be made ready for a product: (in backward only, each way)."""
    name, in_fp8 = job.stored(role), job.in_fp8(role)
    if not job.rank:
        return 0.0, 0.0
    if kind_named(name).as_it_lies:
        return (2.0 if in_fp8 else 0.0), 0.0  # transposed, of fp8
    return 0.0, bits_of(name) / 8 + (1 if in_fp8 else job.compute)


def element_bytes(c: DecoderConfig, sparse: bool, each: int) -> float:
    """Of a token, both ways."""
    m = c.moe
    width = c.intermediate_size if m is None or not sparse else m.shared_width
    values = OF_HIDDEN * c.hidden_size + OF_WIDTH * width
    values += OF_HEADS * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    if m is not None and sparse:
        values += m.choices * (OF_ROW_HIDDEN * c.hidden_size + OF_ROW_WIDTH * m.width)
    return float(each * values)


def exchanges(job: Job, sparse: bool, layout: Layout, tokens: int, links: LinkRates) -> float:
    """Seconds of the collectives inside one layer, one way."""
    c = job.model
    hidden = tokens * c.hidden_size * job.compute
    out = 2 * links.reduce(hidden, layout.tp, layout.tp)
    if layout.cp > 1:
        kv = tokens * layout.cp * 2 * c.num_kv_heads * c.head_dim * job.compute / layout.tp
        out += links.gather(kv, layout.cp, layout.cp * layout.tp)
    if sparse and c.moe is not None and layout.experts_over_data:
        own = hidden / (layout.tp if layout.experts_over == "world" else 1)
        reach = layout.expert_ranks * (1 if layout.experts_over == "world" else layout.tp)
        out += 2 * links.exchange(own * c.moe.choices, layout.expert_ranks, reach)
    return out


def head_time(job: Job, layout: Layout, tokens: int, rates: CardRates) -> tuple[float, float]:
    """The head and its loss: gradients are formed in the forward pass."""
    c = job.model
    weights = c.outputs * c.hidden_size / layout.tp
    each = FORWARD + INPUT_GRADIENT + (0 if job.rank else WEIGHT_GRADIENT)
    trained = tokens * job.trained
    logits = trained * c.outputs / layout.tp * 2 * job.compute
    return each * weights * trained / rates.dense + logits / rates.elementwise, 0.0


def teacher_time(job: Job, layout: Layout, tokens: int, rates: CardRates, links: LinkRates) -> tuple[float, float]:
    """Its forward pass and head with the passes over both models' logits; and what the host needs for its launches."""
    c = job.teacher
    if c is None:
        return 0.0, 0.0
    own = replace(job, model=c, rank=0)
    layers = [layer_time(own, c.sparse(n), layout, tokens, rates, links) for n in range(c.num_layers)]
    trained = tokens * job.trained
    head = FORWARD * c.vocab_size * c.hidden_size * trained / rates.dense
    logits = OF_LOGITS * 4 * c.vocab_size * trained / rates.elementwise
    return sum(layer.forward for layer in layers) + head + logits, sum(layer.reference for layer in layers)


def update_time(share: TensorBytes, job: Job, rates: CardRates) -> float:
    """Every state read and written, the gradient read, the weight written."""
    states = share.master + share.moments
    away = 2 * states / rates.host if job.offload_optimiser else 0.0
    rate = rates.update * (UPDATE_8BIT if job.blocks.storing.moments == "8bit" else 1.0)
    return max(away, (2 * states + share.gradients + share.trained * job.compute) / rate)


def early_share(job: Job, layout: Layout, share: TensorBytes) -> float:
    """Of the gradients of data-parallel ranks, those whose sums begin inside the last backward pass
    (parallel/overlapped_reduce.py): all but the embedding's, which comes last. An adapter's fit into one bucket."""
    if not layout.whole_layers or layout.pp > 1 or job.rank or job.model.vision is not None or not share.trained:
        return 0.0
    return max(0.0, 1 - job.model.vocab_size * job.model.hidden_size / share.trained)


def sharing_time(
    job: Job, layout: Layout, share: TensorBytes, micro_batches: int, links: LinkRates
) -> tuple[float, float]:
    """Seconds of weights and gradients between data ranks: (overlapped with the computation, after it)."""
    overlapped = after = 0.0
    reach = layout.tp * layout.cp
    if layout.fsdp > 1:
        ranks, extent = layout.fsdp * layout.cp, layout.fsdp * reach
        times = 2 * micro_batches if layout.sharding_stage == 3 else 1
        overlapped += times * links.gather(share.gathered, ranks, extent)
        reductions = 1 if layout.sharding_stage == 1 else micro_batches
        overlapped += reductions * links.gather(4 * share.reduced, ranks, extent)
        after += links.reduce(4 * share.trained, layout.dp, layout.dp * extent)
    else:
        after += links.reduce(4 * share.trained, layout.dp * layout.cp, layout.dp * reach)
    return overlapped, after
