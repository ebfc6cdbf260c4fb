"""Folders that compressed-tensors and bitsandbytes themselves wrote, read by us; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.slices import fill_boxes
from erniekit.demo.tiny import SHAPE
from erniekit.errors import CheckpointError
from erniekit.models import MODELS
from erniekit.models.init import init_weights
from erniekit.parallel.sharding import Box

PRESETS = {"W8A8": "int-quantized", "FP8_DYNAMIC": "float-quantized", "MXFP4A16": "mxfp4-pack-quantized",
           "W4A16": "pack-quantized", "W8A16": "pack-quantized"}  # fmt: skip


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    raw = {"model_type": "ernie4_5", **SHAPE, "num_hidden_layers": 1, "num_attention_heads": 8,
           "tie_word_embeddings": True, "use_bias": False}  # fmt: skip
    spec = MODELS.get("ernie4_5")
    config = spec.read_config(raw, "hf", False, "")
    model = spec.build(config)
    init_weights(model, 0, 0.1)
    state = spec.cast(model, torch.bfloat16).state_dict()
    write_model(tmp_path / "plain", config, state.__getitem__)
    return tmp_path / "plain"


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def rewritten(
    plain: Path, out: Path, store: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], config: dict[str, Any]
) -> Path:
    tensors = load_file(plain / "model.safetensors")
    stored = {k: v for n, t in tensors.items() for k, v in (store(n, t) if is_linear(n) else {n: t}).items()}
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / "model.safetensors")
    told = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return out


def config_of(scheme: QuantizationScheme, form: str) -> dict[str, Any]:
    group = json.loads(scheme.model_dump_json())
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def by_compressed_tensors(plain: Path, out: Path, preset: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder, and the weights as that library reads them."""
    scheme, form = preset_name_to_scheme(preset, ["Linear"]), PRESETS[preset]
    kind, expected = BaseCompressor.get_value_from_registry(form), {}

    def store(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        grouped = weight.unflatten(1, (-1, scheme.weights.group_size or weight.shape[1]))
        scale = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)[0]
        parts = kind.compress({"weight": weight, "weight_scale": scale}, scheme)
        expected[name] = kind.decompress(parts, scheme)["weight"].to(torch.bfloat16)
        return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    return rewritten(plain, out, store, config_of(scheme, form)), expected


@pytest.mark.parametrize("preset", PRESETS)
def test_folders_of_compressed_tensors_read_as_that_library_reads_them(
    preset: str, plain: Path, tmp_path: Path
) -> None:
    folder, expected = by_compressed_tensors(plain, tmp_path / "out", preset)
    read = ModelFolder(folder)
    read.build()
    for name, weight in expected.items():
        assert torch.equal(read.tensor(name), weight)
        assert torch.equal(read.slices().read(name), weight)
        assert read.slices().shape(name) == tuple(weight.shape)


def test_a_rank_reads_its_part_of_a_quantised_weight(plain: Path, tmp_path: Path) -> None:
    folder, _ = by_compressed_tensors(plain, tmp_path / "out", "W4A16")
    read = ModelFolder(folder)
    entry = next(e for e in read.entries() if e.ours == "layers.0.attn.qkv.weight")
    whole = read.read(entry)
    part = torch.empty(40, 64, dtype=torch.bfloat16)
    at = (slice(100, 140), slice(32, 96))
    fill_boxes(read.slices(), entry, [Box(at, (slice(0, 40), slice(0, 64)))], part)
    assert torch.equal(part, whole[at])


@pytest.mark.parametrize("nested", [True, False])
def test_weights_that_bitsandbytes_saved_are_read(nested: bool, plain: Path, tmp_path: Path) -> None:
    expected = {}

    def store(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=nested)
        expected[name] = bnb.dequantize_4bit(packed, state)
        return {name: packed, **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    read = ModelFolder(rewritten(plain, tmp_path / "out", store, config))
    read.build()
    for name, weight in expected.items():
        assert torch.equal(read.tensor(name), weight)


WEIGHTS = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}


def changed_config(folder: Path, **values: Any) -> None:
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_method": "awq"}, "'awq', which is not read"),
        ({"config_groups": {}}, "no config_groups"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "a group that is not compressed-tensors'"),
        ({"config_groups": {"a": 3}}, "a group that is not compressed-tensors'"),
        ({"config_groups": {"a": {"targets": ["re:(a+)+$"], **WEIGHTS}}}, "is not read"),
        ({"config_groups": {"a": {"targets": ["re:.*.*.*.*x"], **WEIGHTS}}}, "is not read"),
        ({"config_groups": {"a": {"targets": ["re:("], **WEIGHTS}}}, "is not read"),
        ({"config_groups": {"a": {"targets": ["re:.*nothing"], **WEIGHTS}}}, "no config_group covers"),
    ],
)
def test_a_config_of_another_kind_is_refused_by_name(plain: Path, tmp_path: Path, values: dict, words: str) -> None:
    folder, _ = by_compressed_tensors(plain, tmp_path / "out", "W4A16")
    changed_config(folder, **values)
    with pytest.raises(CheckpointError, match=words):
        ModelFolder(folder)


def test_asymmetric_reordered_and_incomplete_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    folder, _ = by_compressed_tensors(plain, tmp_path / "out", "W4A16")
    tensors = load_file(folder / "model.safetensors")
    first = "model.layers.0.mlp.down_proj"
    for extra in ("weight_zero_point", "weight_g_idx"):
        save_file({**tensors, f"{first}.{extra}": torch.zeros(4)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=extra):
            ModelFolder(folder)
    for gone in ("weight_packed", "weight_shape"):
        rest = {name: tensor for name, tensor in tensors.items() if name != f"{first}.{gone}"}
        save_file(rest, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=gone):
            ModelFolder(folder)
    for part, wrong in (("weight_shape", torch.tensor([128, 999])), ("weight_scale", torch.ones(3, 2))):
        save_file({**tensors, f"{first}.{part}": wrong}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=part):
            ModelFolder(folder).build()


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("preset", "part", "wrong", "words"),
    [
        ("W4A16", "weight_packed", lambda t: t.flatten(), "is not a matrix"),
        ("W4A16", "weight_packed", lambda t: t.float(), "weight_packed is float32, int32 belongs there"),
        ("W4A16", "weight_shape", lambda t: t[0], "weight_shape says"),
        ("W4A16", "weight_shape", lambda t: t.float(), "weight_shape is float32"),
        ("W4A16", "weight_scale", lambda t: t * torch.nan, "weight_scale holds NaN"),
        ("W8A8", "weight", lambda t: t[None], "is not a matrix"),
        ("W8A8", "weight_scale", lambda t: t.bool(), "weight_scale is bool"),
        ("W8A8", "weight_scale", lambda t: None, "stored as int8, which is not a weight by itself"),
        ("FP8_DYNAMIC", "weight_scale", lambda t: None, "stored as float8_e4m3fn, which is not a weight by itself"),
        ("MXFP4A16", "weight_scale", lambda t: t.float(), "weight_scale is float32, uint8 belongs there"),
    ],
)
def test_a_part_of_another_shape_dtype_or_content_is_refused_and_never_decoded(
    plain: Path, tmp_path: Path, preset: str, part: str, wrong: Callable, words: str
) -> None:
    folder, _ = by_compressed_tensors(plain, tmp_path / "out", preset)
    tensors = load_file(folder / "model.safetensors")
    value = wrong(tensors.pop(f"{DOWN}.{part}"))
    if value is not None:
        tensors[f"{DOWN}.{part}"] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as error:
        ModelFolder(folder).build()
    assert str(folder) in error.value.where


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        ("weight", lambda t: None, "is missing, though its quant_state is there"),
        ("weight", lambda t: t.float(), "weight is float32, uint8 belongs there"),
        ("weight.absmax", lambda t: t.float(), "absmax is float32, uint8 belongs there"),
        ("weight.nested_absmax", lambda t: t[:0], "nested_absmax is not as long"),
        ("weight.quant_map", lambda t: t.flip(0), "its quant_map is another"),
        ("weight.quant_map", lambda t: t[:8], "its quant_map is another"),
        ("weight.nested_quant_map", lambda t: t * 0.5, "its nested_quant_map is another"),
        ("weight.quant_state.bitsandbytes__nf4", lambda t: t.long().sum() * 10**12, "quant_state"),
    ],
)
def test_a_damaged_part_of_bitsandbytes_is_refused_too(
    plain: Path, tmp_path: Path, part: str, wrong: Callable, words: str
) -> None:
    def store(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        return {name: packed, **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    folder = rewritten(plain, tmp_path / "out", store, config)
    tensors = load_file(folder / "model.safetensors")
    value = wrong(tensors.pop(f"{DOWN}.{part}"))
    if value is not None:
        tensors[f"{DOWN}.{part}"] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        ModelFolder(folder).build()
