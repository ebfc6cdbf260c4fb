"""The arithmetic a step is worth, whoever does it: what MFU and the share of the ceiling are made of.

Called by worker.py. The same count for all, so that a peer gains nothing by computing more than the data asks for.
"""

from __future__ import annotations

from erniekit.data.types import Batch
from erniekit.models.config import DecoderConfig

FORMULA = (
    "FLOPs of a step = c x (weights in layers that a token meets x tokens + head x trained tokens) "
    "+ 7 x layers x heads x head_dim x sum of squared document lengths; c is 6, with LoRA 4 (a frozen weight has no "
    "gradient); a live reference adds 2 x the weights and 2 x the attention. Causal attention counts once (half the "
    "square), its backward as 2.5 forwards. MFU is against 989.4 TFLOP/s on H100 and H200."
)


def useful_flops(c: DecoderConfig, batches: list[Batch], lora: bool, live_reference: bool) -> float:
    head = c.vocab_size * c.hidden_size
    in_layers = c.active_parameters() - head * (1 if c.tie_word_embeddings else 2)
    tokens = sum(b.num_tokens for b in batches)
    trained = sum(b.num_label_tokens for b in batches)
    weights = float(in_layers * tokens + head * trained)
    attention = float(c.num_layers * c.num_heads * c.head_dim * sum(b.sum_squares for b in batches))
    total = (4 if lora else 6) * weights + 7 * attention
    return total + 2 * weights + 2 * attention if live_reference else total
