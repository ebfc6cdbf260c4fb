"""A tiny ERNIE (with experts or without) or Llama folder made from nothing, its tokenizer trained on the demo's text.

Called by recipes/demo.py, and by tests that need a real model in a second.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.shards import write_json
from erniekit.data.compiled_template import BUILT_IN
from erniekit.data.tokenizer import BEGIN, END
from erniekit.models import MODELS
from erniekit.models.init import init_weights

DATA = Path(__file__).parent / "data"
TRAIN, PERSONA = DATA / "sft-train.jsonl", DATA / "persona.jsonl"
VOCAB = 1280

# ERNIE-4.5-0.3B, shrunk; as there, heads x head_dim is not hidden_size, so that a mix-up of the two shows.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,  # five times the usual: a model this small then learns in a minute
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False},
    "ernie4_5_moe": {
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "head_dim": None,  # here heads x head_dim is hidden_size, as in every release
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "num_nextn_predict_layers": 1,
    },
    "llama": {"rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"},
}


def make_tiny_model(
    folder: str | Path, seed: int = 0, family: str = "ernie4_5", layout: str = "hf", layers: int = 0
) -> Path:
    """`folder` with config.json, fp32 weights in `layout` and a tokenizer; the same bytes for the same arguments.
    layers: another number of them than SHAPE's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    spec = MODELS.get(family)
    raw = {"model_type": family, **SHAPE, **FAMILIES[family]}
    raw["num_hidden_layers"] = layers or raw["num_hidden_layers"]
    config = spec.read_config(raw, "hf", not raw["tie_word_embeddings"], str(folder))
    model = spec.build(config)
    init_weights(model, seed, config.init_std)
    state: dict[str, torch.Tensor] = model.state_dict()
    write_model(folder, config, state.__getitem__, layout=layout)
    make_tokenizer(folder)
    return folder


def make_tokenizer(
    folder: Path, text: Iterable[str] | None = None, vocab: int = VOCAB, control: Sequence[str] = ()
) -> None:
    """SentencePiece BPE as ERNIE has it: bytes for unknown letters, digits apart, no blank put in front.

    text: that its pieces come from, the demo's when not given. control: more control tokens.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(demo_text() if text is None else text),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        user_defined_symbols=[BEGIN, END, *control, "\n"],
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        num_threads=1,  # more would still agree, but not by promise
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    roles: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    roles |= {"cls_token": BEGIN, "sep_token": END}
    if control:
        roles["additional_special_tokens"] = list(control)
    write_json(folder / "special_tokens_map.json", roles)
    settings = {
        **roles,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "tokenizer_class": "Ernie4_5_Tokenizer",
        # As text for other programs, which have no `begin_token`.
        "chat_template": BUILT_IN.replace("begin_token", repr(BEGIN)).replace("end_token", repr(END)),
        "model_max_length": SHAPE["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", settings)


def demo_text() -> Iterator[str]:
    for path in (TRAIN, PERSONA):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield from row.get("system", "").splitlines()
            for question, answer in zip(row["src"], row["tgt"]):
                yield from f"User: {question}".splitlines()
                yield f"Assistant: {answer}"
