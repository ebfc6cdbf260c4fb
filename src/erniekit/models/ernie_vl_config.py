"""config.json of ERNIE-4.5-VL, read and written: the flat one of releases, Paddle and vLLM, and transformers' nested
one. Called by models/ernie_vl.py.

Flat: text fields at the top, lists of two (text, vision) for experts. Nested: `text_config`, `vision_config`, one
number of experts, `mlp_layer_types`, `mrope_section`. The tensor names in the files do not show which it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from erniekit.models import ernie_dense
from erniekit.models.config import BankShape, DecoderConfig, MoEShape, VisionShape, hf_dtype
from erniekit.models.fields import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_MLP, MAX_WIDTH, Fields

FLAT_TYPE, NESTED_TYPE = "ernie4_5_moe_vl", "ernie4_5_vl_moe"
ARCHITECTURE = "Ernie4_5_VLMoeForConditionalGeneration"
MAX_SIDE = 1 << 10  # pixels of a patch, patches of a block
# ours, and what the two worlds call it
BOUNDS = (("image_bounds", ("image_start_token_id", "image_end_token_id")),
          ("video_bounds", ("video_start_token_id", "video_end_token_id")))  # fmt: skip
_PER_MODALITY = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index", "moe_k")


def read_config(raw: dict[str, Any], layout: str, has_head: bool, where: str) -> DecoderConfig:
    top = Fields(raw, where)
    nested = isinstance(raw.get("text_config"), dict)
    text = {**top.object("text_config"), "tie_word_embeddings": _tied(raw)} if nested else raw
    text = _unscaled(text)
    f = Fields(text, where)
    f.only("use_bias", False)
    f.only("moe_gate_act", "softmax")
    f.only("moe_group_experts", False)
    f.only("rope_3d", True)
    f.only("use_temporal_conv", True)
    both = {key: _two(f, key, text.get(key)) for key in _PER_MODALITY}
    dense = ernie_dense.read_config(text, "paddle", has_head, where)  # head_dim is hidden / heads in both worlds here
    return replace(
        dense,
        family=NESTED_TYPE,
        moe=_experts(f, both, dense.num_layers),
        vision=_vision(top, f, nested),
        mrope=_sections(f, dense.head_dim),
        raw=raw,
        raw_layout="nested" if nested else "flat",
    )


def _unscaled(text: dict[str, Any]) -> dict[str, Any]:
    """Older files call positions on three axes a scaling, `mrope`; nothing is scaled."""
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, dict) or "mrope" not in (scaling.get("type"), scaling.get("rope_type")):
        return text
    return {**text, "rope_scaling": {key: "default" if value == "mrope" else value for key, value in scaling.items()}}


def _tied(raw: dict[str, Any]) -> Any:
    inner = raw["text_config"].get("tie_word_embeddings")
    return raw.get("tie_word_embeddings") if inner is None else inner


def _two(f: Fields, key: str, value: Any) -> tuple[Any, Any]:
    """(text, vision); one number is both's."""
    if not isinstance(value, list):
        return value, value
    if len(value) != 2:
        raise f.refuse(key, "a list of two integers (text, vision) for", value)
    return value[0], value[1]


def _experts(f: Fields, both: dict[str, tuple[Any, Any]], layers: int) -> MoEShape:
    def number(key: str, place: int, least: int, most: int) -> int:
        return Fields({key: both[key][place]}, f.where).size(key, 0, least, most)

    for key, most in (("moe_num_experts", MAX_EXPERTS), ("moe_intermediate_size", MAX_MLP), ("moe_k", MAX_EXPERTS)):
        for value in both[key]:
            Fields({key: value}, f.where).need(key, most)
    (experts, of_vision), (choices, other) = both["moe_num_experts"], both["moe_k"]
    if experts != of_vision or choices != other:  # the file's bias is one tensor with a row for each
        key = "moe_num_experts" if experts != of_vision else "moe_k"
        raise f.refuse(key, "the same number for text and vision as", list(both[key]))
    if choices > experts:
        raise f.refuse("moe_k", f"at most moe_num_experts ({experts}) for", choices)
    width, vision_width = both["moe_intermediate_size"]
    balanced = f.flag("moe_use_aux_free", True)
    start, end, interval = _sparse_layers(f, layers)
    if start is None:
        start = min(number("moe_layer_start_index", place, 0, MAX_LAYERS) for place in (0, 1))
        ends = [both["moe_layer_end_index"][place] for place in (0, 1)]
        last = max(number("moe_layer_end_index", place, -1, MAX_LAYERS) for place in (0, 1))
        end = layers - 1 if None in ends or -1 in ends else min(last, layers - 1)  # past the last layer in releases
        interval = f.size("moe_layer_interval", 1, 1, MAX_LAYERS)
    return MoEShape(
        experts=experts,
        choices=choices,
        width=width,
        shared_width=width * f.size("moe_num_shared_experts", 0, 0, MAX_EXPERTS),
        start=start,
        end=end,
        interval=interval,
        norm_min=f.number("moe_norm_min", 1e-12, 0.0, 1.0),
        bias=balanced,
        biased=balanced,
        vision=BankShape(of_vision, vision_width),
    )


def _sparse_layers(f: Fields, layers: int) -> tuple[int | None, int, int]:
    """start, end and interval of transformers' list; None: there is no list."""
    kinds = f.raw.get("mlp_layer_types")
    if kinds is None:
        return None, 0, 1
    fits = isinstance(kinds, list) and len(kinds) == layers and set(map(str, kinds)) <= {"dense", "sparse"}
    sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"] if fits else []
    if not sparse:
        raise f.refuse("mlp_layer_types", f"a list of {layers} words, dense or sparse (one at least), for", kinds)
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    expected = [i for i in range(sparse[0], sparse[-1] + 1) if (i + 1) % interval == 0]
    if sparse != expected:
        raise f.refuse("mlp_layer_types", "sparse layers at one distance for", kinds)
    return sparse[0], sparse[-1], interval


def _vision(top: Fields, text: Fields, nested: bool) -> VisionShape:
    v = Fields(top.object("vision_config"), top.where)
    v.only("hidden_act", "quick_gelu")
    width = v.need("hidden_size", MAX_WIDTH)
    heads = v.need("num_heads", MAX_HEADS)
    if width % heads or width // heads % 4:
        raise v.refuse("num_heads", f"a divisor of the vision hidden_size ({width}), each of 4 n channels, for", heads)
    if v.raw.get("intermediate_size") is None:
        mlp_width = int(width * v.number("mlp_ratio", 4, 1e-3, 1e3))
    else:
        mlp_width = v.need("intermediate_size")
    # Releases keep these at the top, transformers with the tower.
    merges = [f.size(key, 2, 1, MAX_SIDE) for f, key in (
        (v, "spatial_merge_size"), (text, "spatial_conv_size"), (v, "temporal_merge_size"), (text, "temporal_conv_size")
    )]  # fmt: skip
    if merges != [2] * 4:
        raise v.refuse("spatial_merge_size", "2 for", merges[0])
    fields = top if nested else text
    video = fields.token("video_token_id", None)
    image = fields.token("image_token_id", fields.token("im_patch_id", None))
    return VisionShape(
        depth=v.need("depth", MAX_LAYERS),
        width=width,
        heads=heads,
        mlp_width=mlp_width,
        patch=v.size("patch_size", 14, 1, MAX_SIDE),
        channels=v.size("in_channels", 3, 1, MAX_SIDE),
        eps=v.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        image_id=image,
        video_id=video,
        **{ours: _bounds(fields, keys) for ours, keys in BOUNDS},  # type: ignore[arg-type]
    )


def _bounds(f: Fields, keys: tuple[str, str]) -> tuple[int, int] | None:
    first, last = (f.token(key, None) for key in keys)
    return None if first is None or last is None else (first, last)


def _sections(f: Fields, head_dim: int) -> tuple[int, int, int]:
    given = (f.object("rope_parameters") or f.object("rope_scaling")).get("mrope_section")
    if given is None:
        by_time = f.size("freq_allocation", 20, 1, MAX_WIDTH)
        side = (head_dim // 2 - by_time) // 2
        given = [side, side, by_time]
    fits = isinstance(given, list) and len(given) == 3 and all(type(n) is int and n >= 0 for n in given)
    if not fits or given[0] != given[1] or sum(given) != head_dim // 2:
        expected = f"three sizes, the first two alike, that fill half of head_dim ({head_dim // 2}) for"
        raise f.refuse("mrope_section", expected, given)
    return given[0], given[1], given[2]


# --- writing ---


def write_config(c: DecoderConfig, layout: str, dtype: str) -> dict[str, Any]:
    """Layouts hf and paddle: flat, as releases and vLLM have it; the others as transformers has it."""
    return _flat(c, layout, dtype) if layout in ("hf", "paddle") else _nested(c, dtype)


def _ids(c: DecoderConfig, image: str) -> dict[str, Any]:
    assert c.vision is not None
    out: dict[str, Any] = {image: c.vision.image_id, "video_token_id": c.vision.video_id}
    for ours, keys in BOUNDS:
        out |= dict(zip(keys, getattr(c.vision, ours) or (None, None)))
    return {key: value for key, value in out.items() if value is not None}


def _flat(c: DecoderConfig, layout: str, dtype: str) -> dict[str, Any]:
    m, v = c.moe, c.vision
    assert m is not None and m.vision is not None and v is not None and c.mrope is not None  # noqa: PT018
    kept = c.raw if c.raw_layout == "flat" else {}
    world = "paddle" if layout == "paddle" else "hf"
    out = ernie_dense.write_config(replace(c, raw=kept, raw_layout=world), world, dtype)
    out.pop("rope_parameters", None)  # transformers' key; a flat file is not for it
    if layout == "hf":  # vLLM computes positions on three axes only where this key names their sections
        scaling = c.rope_scaling or kept.get("rope_scaling") or {"rope_type": "default"}
        out["rope_scaling"] = {**scaling, "mrope_section": list(c.mrope)}
    vision = dict(kept.get("vision_config") or {})
    vision |= {"depth": v.depth, "hidden_size": v.width, "embed_dim": v.width, "num_heads": v.heads}
    ratio = v.mlp_width / v.width
    vision |= {"mlp_ratio": int(ratio) if ratio == int(ratio) else ratio, "patch_size": v.patch}
    vision |= {"in_channels": v.channels, "spatial_merge_size": v.merge, "hidden_act": "quick_gelu"}
    return out | {
        "architectures": [ARCHITECTURE],
        "model_type": FLAT_TYPE,
        "moe_num_experts": [m.experts, m.vision.experts],
        "moe_intermediate_size": [m.width, m.vision.width],
        "moe_k": m.choices,
        "moe_num_shared_experts": m.shared_width // m.width,
        "moe_layer_start_index": kept.get("moe_layer_start_index", [m.start, m.start]),
        "moe_layer_end_index": kept.get("moe_layer_end_index", [m.end, m.end]),
        "moe_layer_interval": m.interval,
        "moe_norm_min": m.norm_min,
        "moe_use_aux_free": m.bias and m.biased,
        "rope_3d": True,
        "freq_allocation": c.mrope[2],
        "pixel_hidden_size": v.width,
        "spatial_conv_size": v.merge,
        "temporal_conv_size": 2,
        "use_temporal_conv": True,
        **_ids(c, "im_patch_id"),
        "vision_config": vision,
    }


def _nested(c: DecoderConfig, dtype: str) -> dict[str, Any]:
    m, v = c.moe, c.vision
    assert m is not None and m.vision is not None and v is not None and c.mrope is not None  # noqa: PT018
    kept = c.raw if c.raw_layout == "nested" else {}
    text = ernie_dense.write_config(replace(c, raw=kept.get("text_config") or {}, raw_layout="hf"), "hf", dtype)
    for key in ("architectures", "torch_dtype", "rope_theta"):
        text.pop(key, None)
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": list(c.mrope)}
    text |= {
        "model_type": f"{NESTED_TYPE}_text",
        "moe_num_experts": m.experts,
        "moe_intermediate_size": [m.width, m.vision.width],
        "moe_k": m.choices,
        "moe_num_shared_experts": m.shared_width // m.width,
        "moe_norm_min": m.norm_min,
        "mlp_layer_types": ["sparse" if c.sparse(i) else "dense" for i in range(c.num_layers)],
    }
    vision = dict(kept.get("vision_config") or {})
    vision |= {"depth": v.depth, "hidden_size": v.width, "num_heads": v.heads, "intermediate_size": v.mlp_width}
    vision |= {
        "patch_size": v.patch,
        "in_channels": v.channels,
        "spatial_merge_size": v.merge,
        "temporal_merge_size": 2,
    }
    vision |= {"hidden_act": "quick_gelu", "rms_norm_eps": v.eps}
    return kept | {
        "architectures": [ARCHITECTURE],
        "model_type": NESTED_TYPE,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": c.tie_word_embeddings,
        **_ids(c, "image_token_id"),
        **hf_dtype(dtype),
    }
