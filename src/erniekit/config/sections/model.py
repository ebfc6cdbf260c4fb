"""Which model, where it comes from, and how its forward runs. Read by the recipes, export and chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key

_DROPOUT = "dropout"
# As kernels/selection.py has them, which needs torch.
KERNEL_OPERATIONS = (
    "attention", "packed attention", "frame attention", "paged attention", "feed-forward", "experts",
    "experts of few tokens", "grouped products", "experts' products with updates", "fp8 products",
    "experts' fp8 products", "head",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSection:
    model_name_or_path: str | None = key(None, "Folder in HF or Paddle layout, or a hub id.", basic=True, path="model")
    download_hub: str | None = key(
        None,
        "Hub named in the download command if the model is not on this disk.",
        choices=("huggingface", "aistudio", "modelscope"),
    )
    continue_training: bool = key(True, "Start from the model's weights; False = from random weights.", fixed=True)
    from_scratch: bool = key(False, "continue_training: False, in ERNIE's pre-training form.")
    initializer_range: float | None = key(
        None, "Standard deviation of random weights; default: that of config.json.", low=0, fixed=True
    )
    attention: str = key(
        "auto",
        "Attention implementation; all give the same result and never attend across documents.",
        choices=("auto", "sdpa", "varlen", "reference"),
    )
    kernels: tuple[str, ...] = key(
        (),
        "operation=implementation, for tests and measurements: force a kernel, e.g. experts=plain. `erniekit doctor` "
        "lists the operations, the chosen kernels and the reasons.",
        commas=True,
        names=KERNEL_OPERATIONS,
    )
    compile: bool | None = key(
        None,
        "torch.compile the decoder layers: slower first step, steps up to 3 % faster. Default: on NVIDIA cards, with "
        "rows of one length or of a few (length_buckets), for runs of more than a quarter of an hour; off for dense "
        "layers that are replayed (cuda_graph), which are as fast without; on where layers are launched that have "
        "experts or adapters, are recomputed or are spread over ranks.",
    )
    cuda_graph: bool | None = key(
        None,
        "Replay the layers as CUDA graphs. Default: on for micro-batches so short that launching kernels takes longer "
        "than running them; off with compile: False. Only for SFT, PT and VL-SFT on NVIDIA cards without "
        "communication inside the layers.",
    )
    tokenizer_name: str | None = key(
        None,
        "Tokenizer folder; default: the model's own.",
        also=("tokenizer", "tokenizer_name_or_path"),
        path="one",
    )
    model_config: Mapping[str, Any] | None = key(
        None, "Values that replace those of config.json; model_config.NAME=VALUE for one of them.", fixed=True
    )
    use_global_causal_attn: bool = key(
        False, "Pre-training: attend across the documents of a row, as ERNIEKit does.", fixed=True
    )
    hidden_dropout_prob: float = key(0.0, "Dropout on hidden states.", low=0, high=1, fixed=True, not_yet=_DROPOUT)
    attention_probs_dropout_prob: float = key(0.0, "Dropout on attention.", low=0, high=1, fixed=True, not_yet=_DROPOUT)
    dropout_warmup_steps: int = key(0, "Steps over which dropout rises from 0.", low=0, fixed=True, not_yet=_DROPOUT)
    num_nextn_predict_layers: int = key(
        0,
        "Number of multi-token prediction (MTP) layers to train; 0 = leave them unchanged.",
        low=0,
        fixed=True,
    )
    multi_token_pred_lambda: float = key(
        0.3, "Weight of the MTP loss; not part of the reported loss.", low=0, fixed=True
    )
    use_recompute_mtp: bool = key(False, "Recompute MTP layers in the backward pass, for less memory.")
    max_position_embeddings: int | None = key(
        None, "Longest position; default: the model's own.", low=1, not_yet="vision"
    )
    bos_token_id: int | None = key(None, "First token; default: the tokenizer's own.", not_yet="vision")
    eos_token_id: int | None = key(None, "Last token; default: the tokenizer's own.", not_yet="vision")
