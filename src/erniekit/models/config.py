"""DecoderConfig: a model's shape under our names, read from and written to Hugging Face and Paddle `config.json`.

Made by models/*.py from a folder's config.json; plain numbers, no torch. What they cost is counted by costs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class BankShape:
    """Experts that tokens of another modality than text take, with a router of their own."""

    experts: int
    width: int


@dataclass(frozen=True)
class VisionShape:
    """The vision tower (a ViT over patches, attention within a frame), the resampler behind it, and their tokens."""

    depth: int
    width: int
    heads: int
    mlp_width: int
    patch: int = 14  # pixels a side
    channels: int = 3
    merge: int = 2  # patches a side that become one token; two frames of a video become one as well
    eps: float = 1e-6  # of every LayerNorm
    theta: float = 10000.0
    mean: tuple[float, ...] = CLIP_MEAN  # of the preprocessor, in its order of channels
    std: tuple[float, ...] = CLIP_STD
    image_id: int | None = None  # the token that a feature takes the place of
    video_id: int | None = None  # the same in a video, where a model has another one for it
    image_bounds: tuple[int, int] | None = None  # start and end
    video_bounds: tuple[int, int] | None = None

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def patch_size(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch**2

    @property
    def merged_width(self) -> int:
        """Of the patches that become one token, side by side."""
        return self.width * self.merge**2


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
    vision: BankShape | None = None  # what vision tokens take instead; the shared experts are the same

    def of_text(self) -> MoEShape:
        """The one bank by itself, as a layer holds it: shared experts and the bias of both are outside the banks."""
        return replace(self, shared_width=0, bias=False, vision=None)

    def of_vision(self) -> MoEShape:
        assert self.vision is not None
        return replace(self.of_text(), experts=self.vision.experts, width=self.vision.width)


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
    vision: VisionShape | None = None  # None: a text model
    mrope: tuple[int, int, int] | None = None  # rotary slots turned by height, width and time; None: one position
    labels: tuple[str, ...] = ()  # classes of a score head in the place of the LM head; one for a reward; none: LM head
    raw: dict[str, Any] = field(default_factory=dict, compare=False)  # config.json as found
    raw_layout: str = "hf"  # which world `raw` came from

    def sparse(self, layer: int) -> bool:
        m = self.moe
        return m is not None and (layer + 1) % m.interval == 0 and m.start <= layer <= m.end

    @property
    def outputs(self) -> int:
        """Rows of the head: tokens, or the classes of a score head."""
        return len(self.labels) or self.vocab_size


def hf_rope(config: DecoderConfig) -> dict[str, Any]:
    """Both spellings, so transformers 4 and 5, vLLM and ERNIEKit each find theirs."""
    nested = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return {"rope_theta": config.rope_theta, "rope_parameters": nested}


def hf_dtype(name: str) -> dict[str, str]:
    """transformers 5 reads `dtype` first; older ones and ERNIEKit read only `torch_dtype`."""
    return {"dtype": name, "torch_dtype": name}
