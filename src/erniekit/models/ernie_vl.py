"""ERNIE-4.5-VL (28B-A3B, 424B-A47B): assembly and weight names. Registered in models/__init__.py.

Layouts: hf (the `-PT` releases and vLLM: bare `vision_model.`), hf_transformers (what transformers saves: the same
under `model.vision_model.`), hf_fused (as transformers holds it in memory) and paddle (`ernie.`). In all but hf_fused
experts of both kinds are numbered through, text first, and gates are [H, E].
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from erniekit.models import ernie_dense
from erniekit.models.config import DecoderConfig
from erniekit.models.ernie_dense import paddle_decoder, paddle_head, paddle_mlp
from erniekit.models.ernie_vl_config import NESTED_TYPE, read_config, write_config
from erniekit.models.fields import Fields
from erniekit.models.layers.decoder import PLAN
from erniekit.models.layers.vision_language import VisionLanguageDecoder
from erniekit.models.names import Entry, hf_attention, hf_head, hf_mlp, reshaped, rows, transposed, verbatim
from erniekit.models.spec import ModelSpec

_BIAS = "moe_statics.e_score_correction_bias"


def settle(c: DecoderConfig, names: Collection[str]) -> DecoderConfig:
    """A run with moe_use_aux_free off left no bias."""
    assert c.moe is not None
    return replace(c, moe=replace(c.moe, bias=any(name.endswith("e_score_correction_bias") for name in names)))


def preprocessed(c: DecoderConfig, fields: dict[str, Any], where: str) -> DecoderConfig:
    """Patches come as bytes: the tower normalises them as the preprocessor would."""
    assert c.vision is not None
    f, channels = Fields(fields, where), c.vision.channels
    f.only("do_normalize", True)
    mean, std = f.numbers("image_mean", channels), f.numbers("image_std", channels)
    if std and min(std) <= 0:
        raise f.refuse("image_std", f"{channels} numbers above zero for", list(std))
    return replace(c, vision=replace(c.vision, mean=mean or c.vision.mean, std=std or c.vision.std))


def layout_of(names: Collection[str]) -> str:
    if any(name.startswith("ernie.") for name in names):
        return "paddle"
    if any(name.startswith("model.language_model.") for name in names):
        return "hf_fused"
    return "hf_transformers" if any(name.startswith("model.vision_model.") for name in names) else "hf"


def names(c: DecoderConfig, layout: str) -> list[Entry]:
    if layout == "paddle":
        return _paddle(c)
    fused = layout == "hf_fused"
    trunk = "model.language_model." if fused else "model."
    out = [verbatim("embed.weight", trunk + "embed_tokens.weight"), verbatim("norm.weight", trunk + "norm.weight")]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"{trunk}layers.{i}."
        out += hf_attention(c, ours, theirs)
        if c.sparse(i):
            out += (_fused_experts if fused else _hf_experts)(c, ours + "mlp.", theirs + "mlp.")
        else:
            out += hf_mlp(ours + "mlp.", theirs + "mlp.", c.intermediate_size, c.mlp_bias)
    tower = {"hf": "vision_model.", "hf_transformers": "model.vision_model.", "hf_fused": "model.vision_tower."}
    stages = ("fc1", "fc2", "ln") if fused else ("0", "2", "3")
    return out + _vision_entries(c, tower[layout], "model.resampler_model.", stages, turned=False) + hf_head(c)


def _banks(c: DecoderConfig) -> tuple[tuple[str, int, int, int], tuple[str, int, int, int]]:
    """(our name, number of the first expert, how many, their width) of each."""
    m = c.moe
    assert m is not None
    assert m.vision is not None
    return ("text", 0, m.experts, m.width), ("vision", m.experts, m.vision.experts, m.vision.width)


def _hf_experts(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    m, H = c.moe, c.hidden_size
    assert m is not None
    out = [verbatim(ours + "correction.bias", theirs + _BIAS)] if m.bias else []
    for (bank, first, E, M), gate in zip(_banks(c), ("gate.weight", "gate.weight_1")):
        each = [f"{theirs}experts.{e}." for e in range(first, first + E)]
        gate_up = tuple(f"{expert}{p}_proj.weight" for expert in each for p in ("gate", "up"))
        out += [
            transposed(f"{ours}{bank}.router.weight", theirs + gate),
            rows(f"{ours}{bank}.experts.gate_up.weight", gate_up, (M,) * (2 * E)),
            rows(f"{ours}{bank}.experts.down.weight", tuple(e + "down_proj.weight" for e in each), (H,) * E),
        ]
    return out + (hf_mlp(ours + "shared.", theirs + "shared_experts.", m.shared_width, False) if m.shared_width else [])


def _fused_experts(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    m, H = c.moe, c.hidden_size
    assert m is not None
    out = []
    if m.bias:
        both = tuple(f"{theirs}{bank}_moe.gate.{_BIAS}" for bank, *_ in _banks(c))
        out.append(rows(ours + "correction.bias", both, (1, 1)))
    for bank, _, E, M in _banks(c):
        mine, his = f"{ours}{bank}.", f"{theirs}{bank}_moe."
        out += [
            verbatim(mine + "router.weight", his + "gate.weight"),
            reshaped(mine + "experts.gate_up.weight", his + "experts.gate_up_proj", (E * 2 * M, H), (E, 2 * M, H)),
            reshaped(mine + "experts.down.weight", his + "experts.down_proj", (E * H, M), (E, H, M)),
        ]
    return out + (hf_mlp(ours + "shared.", theirs + "shared_experts.", m.shared_width, False) if m.shared_width else [])


def _paddle(c: DecoderConfig) -> list[Entry]:
    vision = _vision_entries(c, "vision_model.", "ernie.resampler_model.", ("0", "2", "3"), turned=True)
    return paddle_decoder(c, _paddle_experts) + vision + paddle_head(c)


def _paddle_experts(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    m, H = c.moe, c.hidden_size
    assert m is not None
    out = [verbatim(ours + "correction.bias", theirs + _BIAS)] if m.bias else []
    for (bank, first, E, M), gate in zip(_banks(c), ("gate.weight", "gate.weight_1")):
        each = [f"{theirs}experts.{e}." for e in range(first, first + E)]
        gate_up = tuple(expert + "up_gate_proj.weight" for expert in each)
        down = tuple(expert + "down_proj.weight" for expert in each)
        out += [
            transposed(f"{ours}{bank}.router.weight", theirs + gate),
            transposed(f"{ours}{bank}.experts.gate_up.weight", gate_up, (2 * M,) * E),
            transposed(f"{ours}{bank}.experts.down.weight", down, (H,) * E),
        ]
    return out + (paddle_mlp(ours + "shared.", theirs + "shared_experts.", False) if m.shared_width else [])


def _vision_entries(
    c: DecoderConfig, tower: str, resampler: str, stages: tuple[str, str, str], turned: bool
) -> list[Entry]:
    """stages: what the two linears and the norm of a resampler's stage are called."""
    assert c.vision is not None
    matrix = transposed if turned else verbatim

    def linear(ours: str, theirs: str) -> list[Entry]:
        return [matrix(ours + ".weight", theirs + ".weight"), verbatim(ours + ".bias", theirs + ".bias")]

    def norm(ours: str, theirs: str) -> list[Entry]:
        return [verbatim(f"{ours}.{leaf}", f"{theirs}.{leaf}") for leaf in ("weight", "bias")]

    out = [matrix("tower.patch.weight", tower + "patch_embed.proj.weight")]
    for b in range(c.vision.depth):
        ours, theirs = f"tower.blocks.{b}.", f"{tower}blocks.{b}."
        for part in ("norm1", "norm2"):
            out += norm(ours + part, theirs + part)
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            out += linear(ours + part, theirs + part)
    out += norm("tower.ln", tower + "ln")
    for stage in ("spatial", "temporal"):
        ours, theirs = f"resampler.{stage}.", f"{resampler}{stage}_linear."
        first, second, last = stages
        out += linear(ours + "fc1", theirs + first) + linear(ours + "fc2", theirs + second)
        out += norm(ours + "ln", theirs + last)
    out += linear("resampler.proj", resampler + "mlp")
    return [*out, verbatim("resampler.norm.weight", resampler + "after_norm.weight")]


SPEC = ModelSpec(
    name=NESTED_TYPE,
    read_config=read_config,
    write_config=write_config,
    build=VisionLanguageDecoder,
    plan=PLAN,
    names=names,
    lora_targets=(
        *ernie_dense.SPEC.lora_targets,
        *(f"{stage}_linear.{part}" for stage in ("spatial", "temporal") for part in ("0", "2")),
    ),
    paddle_prefix="ernie.",
    layout_of=layout_of,
    settle=settle,
    preprocessed=preprocessed,
    fp32=("router.weight", "correction.bias"),
)
