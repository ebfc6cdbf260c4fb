"""DecoderConfig: a text model's shape in our words, read from and written to Hugging Face and Paddle `config.json`.

Made by models/*.py from a folder's config.json; plain numbers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from erniekit.models import costs


@dataclass(frozen=True)
class MoEShape:
    """The experts of a model; `start` to `end` (inclusive) are its sparse layers, every `interval`-th of them."""

    experts: int
    choices: int
    width: int
    shared_width: int  # of the one MLP all shared experts form; 0: none
    start: int
    end: int
    interval: int = 1
    norm_min: float = 1e-12
    bias: bool = True  # the correction bias that balances without a loss
    biased: bool = True  # whether choosing looks at it (moe_use_aux_free)
    capacity: tuple[float, float, float] | None = None  # None: no token is ever dropped
    fewest: int = 1  # tokens an expert has room for at least, where there is a capacity
    most: int | None = None  # tokens an expert takes at most


@dataclass(frozen=True)
class DecoderConfig:
    family: str  # the MODELS entry that made it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_style: str  # pairs | halves
    tie_word_embeddings: bool
    max_positions: int
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    init_std: float = 0.02
    rope_scaling: dict[str, Any] | None = None
    bos_id: int | None = 1
    eos_id: int | None = 2
    pad_id: int | None = 0
    moe: MoEShape | None = None
    mtp_layers: int = 0  # extra layers that predict further tokens
    raw: dict[str, Any] = field(default_factory=dict, compare=False)  # config.json as found
    raw_layout: str = "hf"  # which world `raw` came from

    def sparse(self, layer: int) -> bool:
        m = self.moe
        return m is not None and (layer + 1) % m.interval == 0 and m.start <= layer <= m.end

    def parameters(self) -> int:
        """Weights in the model; tied embeddings counted once."""
        return costs.parameters(self)

    def active_parameters(self) -> int:
        """Weights a token meets: its chosen experts only, and no layer that predicts further tokens."""
        return costs.active_parameters(self)


def hf_rope(config: DecoderConfig) -> dict[str, Any]:
    """Both spellings, so transformers 4 and 5, vLLM and ERNIEKit each find theirs."""
    nested = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta, "rope_parameters": nested}


def hf_dtype(name: str) -> dict[str, str]:
    """transformers 5 reads `dtype` first; older ones and ERNIEKit know only `torch_dtype`."""
    return {"dtype": name, "torch_dtype": name}
