"""What a model costs, counted from its shape only: weights, FLOPs of a step, bytes of weights, states and activations.

The one place that counts them, for the trainer's metrics, `erniekit bench` and the decisions on memory and CUDA graphs.
docs/performance.md has the definition of MFU. No torch, and nothing here depends on how layers are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from erniekit.models import vision_costs
from erniekit.models.config import DecoderConfig
from erniekit.weight_kinds import BF16, PLAIN, kinds_of

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 2, 2, 2  # FLOPs for each weight and token
ATTENTION_FORWARD = 2  # FLOPs for each query head, element of a head and squared length: two products, half the square
ATTENTION_BACKWARD = 4  # four products: the scores that a fused kernel forms again are recompute, and do not count
FORMULA = (
    "model FLOPs of a step = c x (weights of the products a token meets x tokens + head x trained tokens) + 6 x "
    "adapter weights a token meets x tokens + 6 x layers x heads x head_dim x sum of squared document lengths; c is 6, "
    "and 4 for frozen weights (LoRA), which have no gradient. Of routed experts the chosen ones count, of causal "
    "attention half the square, of recomputed work nothing. A live reference adds its forward pass. MFU = model FLOPs "
    "/ (seconds x ranks x peak of one device); the peak of H100 and H200 is 989.4 TFLOP/s in bf16."
)

WEIGHT_BYTES = GRADIENT_BYTES = 2  # in 16 bit
# Of a trained weight besides itself, by master_weights and optim_states. 8bit: two codes, and three fp32 scales a
# block.
MASTER_BYTES = {"fp32": 4.0, "exact16": 2.0, "none": 0.0}
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 3 * 4 / 256}
OPTIMIZER_BYTES = MASTER_BYTES["fp32"] + MOMENT_BYTES["fp32"]


class Product(NamedTuple):
    """A weight matrix that activations are multiplied by; of an expert's, one of `copies`, `met` of them by a token."""

    kind: str  # attention | mlp | shared | experts | router
    name: str  # of the projection, as transformers has it
    inputs: int
    outputs: int
    copies: int = 1
    met: int = 1

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def weights_met(self) -> int:
        return self.met * self.inputs * self.outputs

    def pair(self, rank: int) -> int:
        """Weights of a LoRA pair of one copy of it."""
        return rank * (self.inputs + self.outputs)

    def adapter(self, rank: int) -> int:
        """Weights of its LoRA pairs that a token meets."""
        return self.met * self.pair(rank)


class TokenCounts(NamedTuple):
    """What steps were computed on: sums over their micro-batches and ranks."""

    tokens: int  # padding apart
    trained: int  # labels, which is where the head runs
    sum_squares: int  # of document lengths
    vision_tokens: int = 0  # of the tokens those that take the vision experts


# --- weights


def layer_products(c: DecoderConfig, sparse: bool, vision: bool = False) -> tuple[Product, ...]:
    """As a token of text meets them, or one of a picture: experts of the other kind are there and not met."""
    H, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    heads = (("q_proj", H, q), ("k_proj", H, kv), ("v_proj", H, kv), ("o_proj", q, H))
    attention = tuple(Product("attention", *shape) for shape in heads)
    m = c.moe
    if m is None or not sparse:
        return attention + _mlp("mlp", H, c.intermediate_size)
    shared = _mlp("shared", H, m.shared_width) if m.shared_width else ()
    text = _bank(H, m.experts, m.width, 0 if vision else m.choices)
    other = () if m.vision is None else _bank(H, m.vision.experts, m.vision.width, m.choices if vision else 0)
    return (*attention, *text, *other, *shared)


def _bank(hidden: int, experts: int, width: int, choices: int) -> tuple[Product, ...]:
    router = Product("router", "gate", hidden, experts, met=1 if choices else 0)
    return (router, *_mlp("experts", hidden, width, experts, choices))


def _mlp(kind: str, hidden: int, width: int, copies: int = 1, met: int = 1) -> tuple[Product, ...]:
    shapes = (("gate_proj", hidden, width), ("up_proj", hidden, width), ("down_proj", width, hidden))
    return tuple(Product(kind, *shape, copies, met) for shape in shapes)


def _layers(c: DecoderConfig) -> tuple[tuple[bool, int], ...]:
    """(whether they have experts, how many of the layers are of that kind)."""
    sparse = sum(c.sparse(layer) for layer in range(c.num_layers))
    return (False, c.num_layers - sparse), (True, sparse)


def weights(c: DecoderConfig) -> dict[str, int]:
    """By kind; their sum is what the model has, tied embeddings counted once. further: layers that predict further
    tokens, all of each. biases: all of the others', and the routers' that balance the experts."""
    H, V = c.hidden_size, c.vocab_size
    found = dict.fromkeys(("embedding", "head", "attention", "mlp", "router", "experts", "shared"), 0)
    tied, bias = (False, False) if c.labels else (c.tie_word_embeddings, c.head_bias)  # a score head has neither
    found["embedding"], found["head"] = V * H, 0 if tied else c.outputs * H
    found["norms"], found["biases"] = (2 * c.num_layers + 1) * H, V * bias
    for sparse, count in _layers(c):
        products = layer_products(c, sparse)
        for product in products:
            found[product.kind] += count * product.weights
        found["biases"] += count * _biases(c, products)
        if sparse and c.moe is not None and c.moe.bias:
            found["biases"] += count * (c.moe.experts + (c.moe.vision.experts if c.moe.vision else 0))
    dense = layer_products(c, sparse=False)
    one = sum(product.weights for product in dense) + _biases(c, dense) + 2 * H * H + 4 * H
    found["further"] = c.mtp_layers * one
    return found | vision_costs.weights(c)


def _biases(c: DecoderConfig, products: Iterable[Product]) -> int:
    """Routed experts have none."""
    has = {"attention": c.attention_bias, "mlp": c.mlp_bias, "shared": c.mlp_bias}
    return sum(product.outputs for product in products if has.get(product.kind))


def parameters(c: DecoderConfig) -> int:
    """Weights in the model; tied embeddings counted once."""
    return sum(weights(c).values())


def active_parameters(c: DecoderConfig, vision: bool = False) -> int:
    """Weights a token of text (or of a picture) meets in the decoder: its chosen experts only, no layer that predicts
    further tokens, and nothing of a vision tower, which meets patches."""
    found = weights(c)
    idle = 0
    for sparse, count in _layers(c):
        idle += count * sum(p.weights - p.weights_met for p in layer_products(c, sparse, vision))
        if sparse and c.moe is not None and c.moe.bias and c.moe.vision is not None:
            idle += count * (c.moe.experts if vision else c.moe.vision.experts)
    apart = ("further", "tower", "resampler")
    return sum(value for kind, value in found.items() if kind not in apart) - idle


def adapters_met(c: DecoderConfig, rank: int, vision: bool = False) -> int:
    """LoRA weights that a token meets, with a pair of `rank` on every projection; routers and further layers have
    none."""
    kinds = ((count, layer_products(c, sparse, vision)) for sparse, count in _layers(c))
    return sum(count * p.adapter(rank) for count, products in kinds for p in products if p.kind != "router")


def adapter_weights(c: DecoderConfig, rank: int) -> int:
    """All of them, every expert's counted."""
    kinds = ((count, layer_products(c, sparse)) for sparse, count in _layers(c))
    return sum(count * p.copies * p.pair(rank) for count, ps in kinds for p in ps if p.kind != "router")


def adapters_met_of(c: DecoderConfig, sizes: Iterable[tuple[str, int]], vision: bool = False) -> int:
    """The same of adapters that a model has, by the names and sizes of its parameters. A router's update is added to
    its weight once a step, whatever the tokens: it is no product of theirs. Of a vision model, what a token of text
    meets in the decoder, or one of a picture."""
    total, others = 0.0, "text" if vision else "vision"
    for name, size in sizes:
        parts = name.split(".")
        if "lora" in parts and not {"router", others, "resampler", "tower"} & set(parts):
            total += size * (c.moe.choices / c.moe.experts if c.moe is not None and ".experts." in name else 1)
    return round(total)


# --- FLOPs


def products_met(c: DecoderConfig, further: int = 0, vision: bool = False) -> int:
    """Weights that a token is multiplied by, the head apart; further: layers that predict further tokens and train."""
    trunk = sum(count * p.weights_met for sparse, count in _layers(c) for p in layer_products(c, sparse, vision))
    one = 2 * c.hidden_size**2 + sum(p.weights_met for p in layer_products(c, sparse=False))
    return trunk + further * one


def _products(c: DecoderConfig, counts: TokenCounts, further: int) -> int:
    """Weights times the tokens that are multiplied by them."""
    of_text = products_met(c, further) * (counts.tokens - counts.vision_tokens)
    return of_text + (products_met(c, further, vision=True) * counts.vision_tokens if counts.vision_tokens else 0)


def attention_work(c: DecoderConfig, sum_squares: int, layers: int) -> float:
    """What ATTENTION_FORWARD and ATTENTION_BACKWARD multiply."""
    return float(layers * c.num_heads * c.head_dim * sum_squares)


def token_flops(c: DecoderConfig, frozen_base: bool = False) -> int:
    """Of a trained token, forward and backward, attention apart: 6 for each weight it is multiplied by; 4 for a frozen
    one, which has no gradient."""
    each = FORWARD + INPUT_GRADIENT + (0 if frozen_base else WEIGHT_GRADIENT)
    return each * (products_met(c) + c.outputs * c.hidden_size)


def forward_flops(c: DecoderConfig, counts: TokenCounts, adapters: float = 0, further: int = 0) -> float:
    """adapters: LoRA weights that a token meets. further: layers that predict further tokens, each with a head."""
    heads = (1 + further) * c.outputs * c.hidden_size * counts.trained
    products = _products(c, counts, further) + adapters * counts.tokens + heads
    return FORWARD * products + ATTENTION_FORWARD * attention_work(c, counts.sum_squares, c.num_layers + further)


def backward_flops(
    c: DecoderConfig, counts: TokenCounts, frozen_base: bool = False, adapters: float = 0, further: int = 0
) -> float:
    """Every input's gradient, though a frozen embedding needs none from the first projections."""
    heads = (1 + further) * c.outputs * c.hidden_size * counts.trained
    base = _products(c, counts, further) + heads
    products = INPUT_GRADIENT * base + (INPUT_GRADIENT + WEIGHT_GRADIENT) * adapters * counts.tokens
    if not frozen_base:
        products += WEIGHT_GRADIENT * base
    return products + ATTENTION_BACKWARD * attention_work(c, counts.sum_squares, c.num_layers + further)


def step_flops(
    c: DecoderConfig,
    counts: TokenCounts,
    frozen_base: bool = False,
    adapters: float = 0,
    further: int = 0,
    live_reference: bool = False,
) -> float:
    """Model FLOPs, forward and backward: what MFU counts. live_reference: a second model, or this one without its
    adapters, runs forward as well."""
    own = forward_flops(c, counts, adapters, further) + backward_flops(c, counts, frozen_base, adapters, further)
    return own + forward_flops(c, counts) if live_reference else own


def mfu(flops: float, seconds: float, peak: float | None, ranks: int = 1) -> float | None:
    """Model FLOPs utilisation: the share of all devices' peak that `flops` of a whole step are; None: no known peak."""
    return flops / (seconds * ranks * peak) if peak else None


# --- bytes


def _packed_bits(base: str) -> dict[str, float]:
    """Of the roles whose weights `base` (a frozen_base) packs."""
    from erniekit.kernels.stored import bits_of  # imports torch, which nothing else here needs

    return {role: bits_of(kind) for role, kind in kinds_of(base).items() if kind != PLAIN}


def weight_bytes(c: DecoderConfig, base: str = BF16) -> float:
    """In 16 bit, but for the roles that `base` (a frozen_base) packs."""
    packed = _packed_bits(base)
    return sum(count * packed.get(role, 8 * WEIGHT_BYTES) / 8 for role, count in weights(c).items())


def packed_bytes(c: DecoderConfig, layer: int, base: str) -> float:
    """Of one layer's weights those that `base` packs."""
    packed = _packed_bits(base)
    return sum(p.weights * packed[p.kind] / 8 for p in layer_products(c, c.sparse(layer)) if p.kind in packed)


def unpacking_bytes(c: DecoderConfig, base: str = BF16) -> int:
    """Scratch memory for the largest packed weight while it is multiplied by; gate and up are one."""
    kinds = kinds_of(base)
    layers = (layer_products(c, sparse) for sparse, count in _layers(c) if count)
    packed = (p.weights for products in layers for p in products if kinds.get(p.kind, PLAIN) != PLAIN)
    return 2 * WEIGHT_BYTES * max(packed, default=0)


def optimizer_bytes(states: str = "fp32", masters: str = "fp32") -> float:
    """Of a trained weight: its master and its moments, by the keys optim_states and master_weights."""
    return MASTER_BYTES[masters] + MOMENT_BYTES[states]


def cache_bytes(c: DecoderConfig, itemsize: int) -> int:
    """Keys and values of a token in all layers, while text is generated."""
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize
