"""A tiny ERNIE-4.5-VL made from nothing, its tokenizer trained on the questions of shapes.py; and its answers.

Called by recipes/demo_vision.py, and by tests that need a vision-language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.shards import write_json
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import TEXT, More, Vision
from erniekit.data.vision.prompt_reader import PromptReader
from erniekit.data.vision.rules import VisionTokens
from erniekit.demo import shapes
from erniekit.demo.tiny import demo_text, make_tokenizer
from erniekit.models import MODELS
from erniekit.models.init import init_weights

VOCAB = 512
FAMILY = "ernie4_5_vl_moe"
# In the order of ids, from 5 on; <mask:...> and ASR are the releases' own, unused.
CONTROL = (
    "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|VIDEO_START|>", "<|VIDEO_END|>",
    "<|VIDEO_PLACEHOLDER|>", "<think>", "</think>",
)  # fmt: skip
# The first six in a config.json; before them are <unk>, <s>, </s> and the two sentence tokens.
TOKEN_IDS = dict(
    im_patch_id=5, image_start_token_id=6, image_end_token_id=7, video_start_token_id=8, video_end_token_id=9,
    video_token_id=10,
)  # fmt: skip
# VL-28B-A3B, shrunk: a first dense layer, then experts of both kinds, the vision's narrower, and shared ones.
SHAPE: dict[str, Any] = {
    "model_type": "ernie4_5_moe_vl",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "freq_allocation": 2,
    "moe_num_experts": [4, 4],
    "moe_intermediate_size": [48, 32],
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [1, 1],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14},
}


def make_tiny_vision(folder: str | Path, seed: int = 0, layout: str = "hf", **shape: Any) -> Path:
    """`folder` with config.json, fp32 weights in `layout`, a tokenizer and a preprocessor_config.json. shape: fields of
    config.json other than SHAPE's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    english = [line for line in demo_text() if line.isascii()]
    make_tokenizer(folder, [*english, *(line for line in shapes.sentences() for _ in range(200))], VOCAB, CONTROL)
    spec = MODELS.get(FAMILY)
    config = spec.read_config({**SHAPE, **shape, **TOKEN_IDS}, "hf", False, str(folder))
    model = spec.build(config)
    init_weights(model, seed, config.init_std)
    write_model(folder, config, model.state_dict().__getitem__, layout=layout)
    write_json(
        folder / "preprocessor_config.json",
        {"patch_size": 14, "merge_size": 2, "temporal_conv_size": 2, "min_pixels": 56 * 56, "max_pixels": 112 * 112},
    )
    return folder


@torch.no_grad()
def answer(model: Any, tokenizer: Tokenizer, reader: PromptReader, messages: Sequence[Any], most: int = 8) -> str:
    """Greedy, the whole prompt at every token: nothing but the model itself takes part."""
    read = reader.read(messages)
    prompt, tokens = read.prompt, VisionTokens.of(tokenizer)
    ids, positions = list(map(int, prompt.ids)), prompt.media.positions
    modality, generated = prompt.media.modality, list[int]()
    places = torch.from_numpy(np.flatnonzero(prompt.ids == tokens.placeholder))
    grids = torch.tensor(prompt.media.grids, dtype=torch.int64)
    vision = Vision(torch.from_numpy(read.patches), grids, places) if len(grids) else None
    while len(generated) < most:
        later = np.arange(len(generated))[:, None].repeat(3, 1) + prompt.next_position
        where = torch.from_numpy(np.concatenate((positions, later)))[None].long()
        kinds = torch.from_numpy(np.concatenate((modality, np.full(len(generated), TEXT, np.uint8))))[None]
        more = More(vision=vision, modality=kinds if vision else None)
        logits = model(torch.tensor([ids + generated]), where, more=more)
        chosen = int(logits[0, -1].argmax())
        if chosen in (tokenizer.eos_id, tokenizer.end_id):
            break
        generated.append(chosen)
    return tokenizer.decode(generated).strip()
