"""config.json of a model of two layers, dense or with experts in the second."""

from __future__ import annotations

from erniekit.recipes.shrunken import SMALL, SMALL_EXPERTS

DENSE = dict(
    SMALL, model_type="ernie4_5", num_hidden_layers=2, vocab_size=256, rms_norm_eps=1e-5, rope_theta=1e4,
    tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = {
    **DENSE, "model_type": "ernie4_5_moe", "moe_layer_start_index": 1, "moe_num_shared_experts": 1, **SMALL_EXPERTS
}  # fmt: skip
