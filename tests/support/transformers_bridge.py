"""Our model as transformers' own class, on the same memory: for its generation loop, and to compare the two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from erniekit.checkpoint.model_writer import DTYPE_NAMES
from erniekit.errors import CheckpointError, NotYetSupportedError
from erniekit.models import MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from erniekit.models.config import DecoderConfig


def to_transformers(model: nn.Module, config: DecoderConfig) -> PreTrainedModel:
    """Built without memory, then given views of our tensors: no second copy of the weights.

    Training one trains the other. Adapters must be folded in first (lora.merge.fold).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.vision is not None:
        raise NotYetSupportedError(
            "answering with a vision-language model is not in this version", fix="use a text model"
        )
    # Layers that predict further tokens serve training only: generation does not run them, nor has transformers any.
    config = replace(config, mtp_layers=0)
    spec = MODELS.get(config.family)
    state = model.state_dict()
    embed = state["embed.weight"]
    theirs = AutoConfig.for_model(**spec.write_config(config, "hf", DTYPE_NAMES[embed.dtype]))
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(theirs, dtype=embed.dtype)
    entries = spec.names(config, "hf" if config.moe is None else "hf_fused")  # as it holds experts in memory
    tensors = {name: part for e in entries for name, part in zip(e.theirs, e.write(state[e.ours]))}
    missing, unexpected = twin.load_state_dict(tensors, strict=False, assign=True)
    unfilled = [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if unexpected or unfilled:
        raise CheckpointError(
            f"transformers' {type(twin).__name__} has no place for {', '.join([*unexpected, *unfilled][:3])}",
            fix="a bias on the head exists only in the Paddle form of this model",
        )
    twin.tie_weights()
    _materialise_frequencies(twin, embed.device)
    return twin.train(model.training)


def _materialise_frequencies(twin: PreTrainedModel, device: torch.device) -> None:
    """Rotary tables are derived, in no checkpoint, and were made on the meta device with the rest."""
    rotary = twin.model.rotary_emb
    twin.model.rotary_emb = type(rotary)(config=twin.config).to(device)
    stray = [name for name, tensor in [*twin.named_parameters(), *twin.named_buffers()] if tensor.is_meta]
    assert not stray, f"still without memory: {stray}"
