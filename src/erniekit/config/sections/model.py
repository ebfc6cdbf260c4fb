"""Which model, where it comes from, and how its forward runs. Read by the recipes, export and chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_DROPOUT = "dropout"


@dataclass(frozen=True)
class ModelSection:
    model_name_or_path: str | None = key(None, "Folder in HF or Paddle layout, or a hub id.", basic=True, path="model")
    download_hub: str | None = key(
        None,
        "Hub named in the download command when the model is not on this disk.",
        choices=("huggingface", "aistudio", "modelscope"),
    )
    continue_training: bool = key(
        True, "Start from the model's weights; False starts from random weights of its config.", fixed=True
    )
    from_scratch: bool = key(False, "continue_training: False, in ERNIE's pre-training form.")
    initializer_range: float | None = key(
        None, "Spread of random weights; that of config.json when not given.", low=0, fixed=True
    )
    attention: str = key(
        "auto",
        "Attention kernel; all give the same result and never look across documents.",
        choices=("auto", "sdpa", "varlen", "reference"),
    )
    kernels: tuple[str, ...] = key(
        (),
        "operation=implementation, for tests and measurements: use this kernel and no other, e.g. experts=plain. "
        "`erniekit doctor` prints the operations with what was chosen, and why.",
        commas=True,
    )
    compile: bool | None = key(
        None,
        "torch.compile the decoder layers: a slower first step, faster ones after. When not given: on NVIDIA cards "
        "with rows of one length, or of a few (length_buckets).",
    )
    cuda_graph: bool | None = key(
        None,
        "Replay the compiled layers as CUDA graphs. When not given: where a micro-batch is so short that launching its "
        "kernels would take longer than running them. On NVIDIA cards whose ranks exchange nothing inside the layers, "
        "SFT and PT.",
    )
    tokenizer_name: str | None = key(
        None,
        "Tokenizer folder; the model's own when not given.",
        also=("tokenizer", "tokenizer_name_or_path"),
        path="one",
    )
    model_config: Mapping[str, Any] | None = key(
        None, "Values that replace those of config.json; model_config.NAME=VALUE for one of them.", fixed=True
    )
    use_global_causal_attn: bool = key(
        False, "Pre-training: attend across the documents of a row, as ERNIEKit does.", fixed=True
    )
    hidden_dropout_prob: float = key(0.0, "Dropout on hidden states.", low=0, high=1, fixed=True, later=_DROPOUT)
    attention_probs_dropout_prob: float = key(0.0, "Dropout on attention.", low=0, high=1, fixed=True, later=_DROPOUT)
    dropout_warmup_steps: int = key(0, "Steps over which dropout grows from 0.", low=0, fixed=True, later=_DROPOUT)
    num_nextn_predict_layers: int = key(
        0,
        "Train the model's layers that predict further tokens: how many it has; 0 keeps them as they are.",
        low=0,
        fixed=True,
    )
    multi_token_pred_lambda: float = key(0.3, "Weight of their loss; never in the reported loss.", low=0, fixed=True)
    use_recompute_mtp: bool = key(False, "Compute them again in the backward pass, for less memory.")
    max_position_embeddings: int | None = key(
        None, "Longest position; the model's own when not given.", low=1, later="vision"
    )
    bos_token_id: int | None = key(None, "First token; the tokenizer's own when not given.", later="vision")
    eos_token_id: int | None = key(None, "Last token; the tokenizer's own when not given.", later="vision")
