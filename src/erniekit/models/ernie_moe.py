"""ERNIE-4.5 with experts (21B-A3B, 300B-A47B): config, assembly and weight names. Registered in models/__init__.py.

Layouts: hf (a file tensor for each expert), hf_fused (all experts of a projection in one, as transformers 5 holds them
in memory) and paddle (`ernie.` names). Layers that predict further tokens (mtp) are read and written in all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from erniekit.models import ernie_dense
from erniekit.models.config import DecoderConfig, MoEShape
from erniekit.models.ernie_dense import paddle_attention, paddle_decoder, paddle_head, paddle_mlp
from erniekit.models.fields import MAX_EXPERTS, MAX_FURTHER, MAX_LAYERS, Fields
from erniekit.models.layers.decoder import PLAN, Decoder
from erniekit.models.names import (
    Entry,
    hf_attention,
    hf_head,
    hf_mlp,
    reshaped,
    rows,
    transposed,
    verbatim,
)
from erniekit.models.spec import ModelSpec


def read_config(raw: dict[str, Any], layout: str, has_head: bool, where: str) -> DecoderConfig:
    f = Fields(raw, where)
    f.only("use_bias", False)  # no release has experts with biases
    f.only("moe_gate_act", "softmax")
    f.only("moe_use_hard_gate", False)
    f.only("moe_group_experts", False)
    dense = ernie_dense.read_config(raw, "paddle", has_head, where)  # head_dim is hidden / heads in both worlds here
    layers = f.need("num_hidden_layers", MAX_LAYERS)
    end = f.size("moe_layer_end_index", layers - 1, -1, MAX_LAYERS)
    width = f.need("moe_intermediate_size")
    experts = f.need("moe_num_experts", MAX_EXPERTS)
    choices = f.need("moe_k", MAX_EXPERTS)
    if choices > experts:
        raise f.refuse("moe_k", f"at most moe_num_experts ({experts}) for", choices)
    capacity = f.numbers("moe_capacity", 3)
    balanced = f.flag("moe_use_aux_free", True)
    moe = MoEShape(
        experts=experts,
        choices=choices,
        width=width,
        shared_width=width * f.size("moe_num_shared_experts", 0, 0, MAX_EXPERTS),
        start=f.size("moe_layer_start_index", 0, 0, MAX_LAYERS),
        end=min(end, layers - 1) if end >= 0 else layers - 1,  # -1, or past the last layer
        interval=f.size("moe_layer_interval", 1, 1, MAX_LAYERS),
        norm_min=f.number("moe_norm_min", 1e-12, 0.0, 1.0),
        bias=balanced,
        biased=balanced,
        # A factor of E gives every expert room for all tokens.
        capacity=(capacity[0], capacity[1], capacity[2]) if capacity and min(capacity) < experts else None,
    )
    mtp = f.size("num_nextn_predict_layers", 0, 0, MAX_FURTHER)
    return replace(dense, family="ernie4_5_moe", moe=moe, mtp_layers=mtp, raw=raw, raw_layout=layout)


def settle(c: DecoderConfig, names: Collection[str]) -> DecoderConfig:
    """What only the files show: transformers drops the further layers and keeps their number in config.json; a run
    with moe_use_aux_free off left no bias."""
    assert c.moe is not None
    mtp = c.mtp_layers if any(".mtp_block." in name for name in names) else 0
    bias = any(name.endswith("e_score_correction_bias") for name in names)
    return replace(c, mtp_layers=mtp, moe=replace(c.moe, bias=bias))


def layout_of(names: Collection[str]) -> str:
    if any(name.startswith("ernie.") for name in names):
        return "paddle"
    return "hf_fused" if any(name.endswith("mlp.experts.gate_up_proj") for name in names) else "hf"


def write_config(c: DecoderConfig, layout: str, dtype: str) -> dict[str, Any]:
    m = c.moe
    assert m is not None
    world = "paddle" if layout == "paddle" else "hf"
    same_world = (c.raw_layout == "paddle") == (world == "paddle")
    out = ernie_dense.write_config(replace(c, raw=c.raw if same_world else {}, raw_layout=world), world, dtype)
    out |= {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_num_experts": m.experts,
        "moe_k": m.choices,
        "moe_intermediate_size": m.width,
        "moe_num_shared_experts": m.shared_width // m.width,
        "moe_layer_start_index": m.start,
        "moe_layer_end_index": m.end,
        "moe_layer_interval": m.interval,
        "moe_norm_min": m.norm_min,
        "moe_use_aux_free": m.bias and m.biased,
        "num_nextn_predict_layers": c.mtp_layers,
    }
    if m.capacity is not None:
        out["moe_capacity"] = list(m.capacity)
    return out


def names(c: DecoderConfig, layout: str) -> list[Entry]:
    return _paddle(c) if layout == "paddle" else _hf(c, fused=layout == "hf_fused")


def _hf(c: DecoderConfig, fused: bool) -> list[Entry]:
    out = [verbatim("embed.weight", "model.embed_tokens.weight"), verbatim("norm.weight", "model.norm.weight")]
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        out += hf_attention(c, ours, theirs)
        if c.sparse(i):
            out += _hf_experts(c, ours + "mlp.", theirs + "mlp.", fused)
        else:
            out += hf_mlp(ours + "mlp.", theirs + "mlp.", c.intermediate_size, c.mlp_bias)
    for d in range(c.mtp_layers):
        out += hf_attention(c, f"mtp.{d}.block.", f"model.mtp_block.{d}.")
        out += hf_mlp(f"mtp.{d}.block.mlp.", f"model.mtp_block.{d}.mlp.", c.intermediate_size, c.mlp_bias)
        out += [*_mtp_norms(d, "model."), verbatim(f"mtp.{d}.proj.weight", f"model.mtp_linear_proj.{d}.weight")]
    return out + hf_head(c)


def _hf_experts(c: DecoderConfig, ours: str, theirs: str, fused: bool) -> list[Entry]:
    m = c.moe
    assert m is not None
    E, H, M = m.experts, c.hidden_size, m.width
    out = [verbatim(ours + "router.weight", theirs + "gate.weight")]
    if m.bias:
        statics = "gate.moe_statics." if fused else "moe_statics."
        out.append(_bias(ours, theirs + statics, E))
    if fused:
        out.append(
            reshaped(ours + "experts.gate_up.weight", theirs + "experts.gate_up_proj", (E * 2 * M, H), (E, 2 * M, H))
        )
        out.append(reshaped(ours + "experts.down.weight", theirs + "experts.down_proj", (E * H, M), (E, H, M)))
    else:
        gate_up = tuple(f"{theirs}experts.{e}.{p}_proj.weight" for e in range(E) for p in ("gate", "up"))
        down = tuple(f"{theirs}experts.{e}.down_proj.weight" for e in range(E))
        out += [
            rows(ours + "experts.gate_up.weight", gate_up, (M,) * (2 * E)),
            rows(ours + "experts.down.weight", down, (H,) * E),
        ]
    if m.shared_width:
        out += hf_mlp(ours + "shared.", theirs + "shared_experts.", m.shared_width, False)
    return out


def _paddle(c: DecoderConfig) -> list[Entry]:
    out = paddle_decoder(c, _paddle_experts)
    for d in range(c.mtp_layers):
        out += paddle_attention(c, f"mtp.{d}.block.", f"ernie.mtp_block.{d}.")
        out += paddle_mlp(f"mtp.{d}.block.mlp.", f"ernie.mtp_block.{d}.mlp.", c.mlp_bias)
        out += [*_mtp_norms(d, "ernie."), transposed(f"mtp.{d}.proj.weight", f"ernie.mtp_linear_proj.{d}.weight")]
    return out + paddle_head(c)


def _paddle_experts(c: DecoderConfig, ours: str, theirs: str) -> list[Entry]:
    m = c.moe
    assert m is not None
    E, H, M = m.experts, c.hidden_size, m.width
    out = [transposed(ours + "router.weight", theirs + "gate.weight")]
    if m.bias:
        out.append(_bias(ours, theirs + "moe_statics.", E))
    gate_up = tuple(f"{theirs}experts.{e}.up_gate_proj.weight" for e in range(E))
    down = tuple(f"{theirs}experts.{e}.down_proj.weight" for e in range(E))
    out += [
        transposed(ours + "experts.gate_up.weight", gate_up, (2 * M,) * E),
        transposed(ours + "experts.down.weight", down, (H,) * E),
    ]
    if m.shared_width:
        out += paddle_mlp(ours + "shared.", theirs + "shared_experts.", False)
    return out


def _bias(ours: str, theirs: str, experts: int) -> Entry:
    return reshaped(ours + "router.bias", theirs + "e_score_correction_bias", (experts,), (1, experts))


def _mtp_norms(depth: int, prefix: str) -> list[Entry]:
    return [
        verbatim(f"mtp.{depth}.{part}_norm.weight", f"{prefix}mtp_{part}_norm.{depth}.weight")
        for part in ("emb", "hidden")
    ]


SPEC = ModelSpec(
    name="ernie4_5_moe",
    read_config=read_config,
    write_config=write_config,
    build=Decoder,
    plan=PLAN,
    names=names,
    lora_targets=ernie_dense.SPEC.lora_targets,
    paddle_prefix="ernie.",
    layout_of=layout_of,
    settle=settle,
    fp32=("router.weight", "router.bias"),
)
