"""A model that was trained in FP8 -> FP8 weights with the scales it was trained with, proven before they appear.

Called by recipes/fp8_export.py. Nothing is calibrated: weights are rounded as training rounded them each time, and
activations' scales are those training used. compressed-tensors' layout, static, one scale a tensor; the parts of a
fused tensor have one scale and all experts of a layer one for their inputs, so that an engine's own merging of them
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.fp8_file import SavedScales
from erniekit.checkpoint.fp8_static import install_scales
from erniekit.checkpoint.model_folder import SIDE_FILES, ModelFolder
from erniekit.checkpoint.model_writer import copy_side_files
from erniekit.checkpoint.probe import KEPT_ROWS, Probe
from erniekit.checkpoint.quantised import KEY
from erniekit.checkpoint.shards import write_json
from erniekit.checkpoint.writer import publish
from erniekit.errors import CheckpointError
from erniekit.export.streamed import streamed
from erniekit.export.target import check_replaceable, check_target, one_export
from erniekit.export.verify import same_tensors
from erniekit.files import read_object
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.kernels import fp8_qat
from erniekit.models.names import Entry
from erniekit.quant_schemes import QUANT_RECIPES
from erniekit.quantize.file_parts import Parts, file_parts
from erniekit.quantize.layer_weights import is_quantised
from erniekit.quantize.model_files import LAYOUT, layer_of, write_weights

RECIPE = QUANT_RECIPES["fp8_static"]
ROTATED = r"re:.*(self_attn|mlp|shared_experts)\.\w+_proj$"  # no expert's: their names end experts.N.x_proj


@dataclass(frozen=True)
class StaticProof:
    """Largest difference of the probe's logits, and what was allowed."""

    difference: float
    allowed: float


def write_static(
    source: ModelFolder,
    scales: SavedScales,
    out: Path,
    *,
    tokenizer: Path | None = None,
    max_shard_size: float = 5.0,
    probe: Probe | None = None,
) -> StaticProof | None:
    """probe: the answer it gave in training. One layer is in memory at a time."""
    check_target(out, [source.path])
    proofs: list[StaticProof] = []
    size = sum(file.stat().st_size for file in set(source.files.values()))
    info: dict[str, Any] = {"base": str(source.path), "quant": "fp8_static, as trained", "layout": LAYOUT}

    def write(folder: Path) -> None:
        copy_side_files(source.path, folder, SIDE_FILES)
        if tokenizer is not None:
            copy_side_files(tokenizer, folder, TOKENIZER_FILES)
        write_weights(folder, source, RECIPE, _parts_of(source, scales), max_shard_size)
        _note_rotation(folder, scales)
        written = ModelFolder(folder)
        changed = {f"{name}.weight" for name in scales.layers}
        same_tensors(source, written, changed)
        if probe is not None:
            proofs.append(prove(written, probe))
            probes.save(folder, probe)
            info["proof"] = vars(proofs[0])

    with one_export(out):
        check_target(out, [source.path])
        publish(out.parent, out.name, write, info=info, expected_bytes=size, may_replace=check_replaceable)
    return proofs[0] if proofs else None


def _parts_of(source: ModelFolder, scales: SavedScales) -> Callable[[int], Parts]:
    read = {entry.ours: entry for entry in source.entries() if not entry.copy_of}
    layers: dict[int, list[Entry]] = {}
    for entry in source.spec.names(source.config, LAYOUT):
        number, inside = layer_of(entry.ours)
        if number >= 0 and is_quantised(inside):
            layers.setdefault(number, []).append(entry)
    missing = [e.ours for each in layers.values() for e in each if e.ours.removesuffix(".weight") not in scales.layers]
    if missing:
        raise CheckpointError(
            f"no scale of {missing[0]} was saved, nor of {len(missing) - 1} more",
            where=str(source.path),
            fix="the weights and fp8_scales.json are of different runs: use another checkpoint",
        )

    def parts(number: int) -> Parts:
        out: Parts = {}
        for entry in layers[number]:
            weight = source.read(read[entry.ours])
            out |= _rounded_parts(entry, weight, source.config.moe, scales)
        return out

    return parts


def _rounded_parts(entry: Entry, weight: torch.Tensor, moe: Any, scales: SavedScales) -> Parts:
    layer = scales.layers[entry.ours.removesuffix(".weight")]
    matrices = moe.experts if ".experts." in entry.ours else 1
    turned = fp8_qat.rotated(weight, layer.block)
    scale = fp8_qat.scale_of(turned.view(matrices, -1).abs().amax(1), scales.highest)
    each = scale.repeat_interleave(weight.shape[0] // matrices)[:, None]
    grid = fp8_qat.to_fp8(turned, each).float() * each
    scheme = RECIPE.experts if matrices > 1 else RECIPE.rest
    return file_parts(entry, grid, each, scheme, torch.tensor([layer.input_scale]))


def _note_rotation(folder: Path, scales: SavedScales) -> None:
    """For engines that rotate activations, in compressed-tensors' format."""
    blocks = {layer.block for name, layer in scales.layers.items() if ".experts." not in name}
    if blocks == {0}:
        return
    if len(blocks) > 1:
        raise CheckpointError(
            f"some linears were rotated in training and some not ({sorted(blocks)}): no file format records it",
            where=str(folder),
            fix="train without apply_hadamard, or in a layout that cuts widths into multiples of hadamard_block_size",
        )
    (block,) = blocks
    config = read_object(folder / "config.json", CheckpointError)
    config[KEY]["transform_config"] = rotation_config(block)
    write_json(folder / "config.json", config)


def rotation_config(block: int) -> dict[str, Any]:
    at = [{"targets": [ROTATED], "location": where, "inverse": where != "input"} for where in ("input", "weight_input")]
    return {"config_groups": {"rotation": {"type": "hadamard", "apply": at, "head_dim": block}}}


def served(folder: ModelFolder) -> nn.Module:
    """The folder's model as an FP8 engine computes it, one layer in memory at a time."""
    return streamed(folder, ready=lambda model, prefix: install_scales(model, folder, prefix))


@torch.no_grad()
def prove(written: ModelFolder, probe: Probe) -> StaticProof:
    """Raises where fp32 does not answer as training did. In bf16 a number may round to the next one of fp8, and experts
    be chosen otherwise: there the difference is reported and never raises."""
    got: torch.Tensor = served(written)(probe.ids, **probe.more())[0][-KEPT_ROWS:]
    difference, allowed = probe.difference(got), probes.allowed(probe, torch.float32)
    if not difference <= allowed and "float32" in probe.setting:
        raise CheckpointError(
            f"the FP8 weights do not answer as the model did in training: logits differ by {difference:.2e}, allowed "
            f"{allowed:.2e}; nothing was published",
            where=str(written.path),
            fix="the weights and fp8_scales.json are of different runs: use another checkpoint",
        )
    return StaticProof(difference, allowed)
