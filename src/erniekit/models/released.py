"""config.json of released models, as far as the shape of one goes: for a benchmark or a plan without the files.

Put together from public sources, as no released file could be read: a folder's own config.json is always preferred.
"""

from __future__ import annotations

from typing import Any

ERNIE_03B = dict(
    model_type="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_hidden_layers=18,
    num_attention_heads=16, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=True, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    use_bias=False,
)  # fmt: skip
ERNIE_21B = dict(
    model_type="ernie4_5_moe", vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_hidden_layers=28,
    num_attention_heads=20, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
    tie_word_embeddings=True, max_position_embeddings=131072, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
    moe_layer_end_index=27, moe_use_aux_free=True, use_bias=False,
)  # fmt: skip
ERNIE_300B = dict(
    ERNIE_21B, hidden_size=8192, intermediate_size=28672, num_hidden_layers=54, num_attention_heads=64,
    num_key_value_heads=8, tie_word_embeddings=False, moe_k=8, moe_intermediate_size=3584, moe_num_shared_experts=0,
    moe_layer_start_index=3, moe_layer_end_index=53,
)  # fmt: skip
LLAMA_13B = dict(
    model_type="llama", vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40,
    num_attention_heads=40, num_key_value_heads=40, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False,
    max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA_13B_LAYERS = dict(LLAMA_13B, num_hidden_layers=8)  # what one card trains in full
_VISION = dict(depth=32, embed_dim=1280, hidden_size=1280, num_heads=16, mlp_ratio=4, patch_size=14, in_channels=3,
               spatial_merge_size=2)  # fmt: skip
_VL: dict[str, Any] = dict(
    model_type="ernie4_5_moe_vl", rope_3d=True, freq_allocation=20, spatial_conv_size=2, temporal_conv_size=2,
    im_patch_id=100295, image_start_token_id=101304, image_end_token_id=101305, video_start_token_id=101306,
    video_end_token_id=101307, video_token_id=103367, pixel_hidden_size=1280, vision_config=_VISION,
)  # fmt: skip
ERNIE_VL_28B = {
    **ERNIE_21B, **_VL, "moe_num_experts": [64, 64], "moe_intermediate_size": [1536, 512],
    "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
}  # fmt: skip
ERNIE_VL_424B = {
    **ERNIE_300B, **_VL, "moe_num_experts": [64, 64], "moe_intermediate_size": [3584, 1536],
    "moe_layer_start_index": [3, 3], "moe_layer_end_index": [53, 53],
}  # fmt: skip
# By a part of the name, in lower case; the first that is in it counts.
RELEASED: dict[str, dict[str, Any]] = {
    "vl-28b-a3b": ERNIE_VL_28B,
    "vl-424b-a47b": ERNIE_VL_424B,
    "ernie-4.5-0.3b": ERNIE_03B,
    "ernie-4.5-21b-a3b": ERNIE_21B,
    "ernie-4.5-lite": ERNIE_21B,  # what the guide to NVIDIA with Iluvatar calls it
    "ernie-4.5-300b-a47b": ERNIE_300B,
    "llama-13b": LLAMA_13B,
}


def released(name: str) -> dict[str, Any] | None:
    """The config.json of a model by its hub name; None: not in the table."""
    return next((dict(raw) for part, raw in RELEASED.items() if part in name.lower()), None)
