"""What a vision tower and its resampler cost, counted from their shape: the part of costs.py that text models lack."""

from __future__ import annotations

from typing import NamedTuple

from erniekit.models.config import DecoderConfig, VisionShape

FORWARD, BACKWARD = 2, 4  # FLOPs for each weight and row; backward is of the input and of the weight
ATTENTION = 4  # for each channel and squared count of a frame's patches: two products, all of the square


class Patches(NamedTuple):
    """What the tower was computed on, and what came of it."""

    patches: int
    squares: int  # sum over frames of their squared patch counts
    tokens: int  # vision tokens that came out
    merged: int | None = None  # patches that the resampler took, where it took others' as well: of kept features


def tower_weights(v: VisionShape) -> int:
    """Of the products only."""
    block = 4 * v.width**2 + 2 * v.width * v.mlp_width
    return v.depth * block + v.patch_size * v.width


def tower_biases(v: VisionShape) -> int:
    return v.depth * (4 * v.width + v.mlp_width + v.width)


def tower_norms(v: VisionShape) -> int:
    return (2 * v.depth + 1) * 2 * v.width


def resampler_weights(c: DecoderConfig) -> tuple[int, int]:
    """Of the products: before two frames become one, and behind it."""
    v = c.vision
    assert v is not None
    s = v.merged_width
    return 2 * s * s, 2 * s * s + s * s + s * c.hidden_size


def weights(c: DecoderConfig) -> dict[str, int]:
    """By kind, biases and norms in each."""
    v = c.vision
    if v is None:
        return {}
    s = v.merged_width
    biases_and_norms = 4 * s + 2 * 2 * s + 2 * c.hidden_size  # four biases, two LayerNorms; the last bias and norm
    tower = tower_weights(v) + tower_biases(v) + tower_norms(v)
    return {"tower": tower, "resampler": sum(resampler_weights(c)) + biases_and_norms}


def forward_flops(c: DecoderConfig, counts: Patches) -> float:
    v = c.vision
    assert v is not None
    products = tower_weights(v) * counts.patches + _resampled(c, counts)
    return FORWARD * products + ATTENTION * v.depth * v.width * counts.squares


def _resampled(c: DecoderConfig, counts: Patches) -> float:
    """The resampler's weights times the rows that are multiplied by them."""
    v = c.vision
    assert v is not None
    before, behind = resampler_weights(c)
    merged = counts.patches if counts.merged is None else counts.merged
    return before * merged / v.merge**2 + behind * counts.tokens


def step_flops(
    c: DecoderConfig, counts: Patches, tower_trained: bool, resampler_trained: bool, adapted: bool = False
) -> float:
    """Forward, and backward of what is trained; a frozen resampler that is adapted, or in front of which a tower is
    trained, passes gradients on."""
    v = c.vision
    assert v is not None
    total = forward_flops(c, counts)
    if tower_trained:
        total += BACKWARD * tower_weights(v) * counts.patches + 2 * ATTENTION * v.depth * v.width * counts.squares
    if tower_trained or resampler_trained or adapted:
        share = BACKWARD if resampler_trained else FORWARD
        total += share * _resampled(c, counts)
    return total


# --- bytes


def kept_bytes(c: DecoderConfig, patches: int, tower: bool, resampler: bool, again: bool, each: int) -> float:
    """What forward leaves for backward of tower and resampler, where a gradient passes them. again: blocks are computed
    again: all leave their input, and one has all of itself. each: bytes of a number. The plain path: every intermediate
    stays."""
    v = c.vision
    if v is None:
        return 0.0
    block = 10 * v.width + 3 * v.mlp_width  # norms' inputs and outputs, q k v, q k turned, attention; the MLP's steps
    blocks = v.depth * v.width + block if again else v.depth * block
    values = float(patches * (blocks + v.width + v.patch_size)) if tower else 0.0
    if tower or resampler:
        merged = patches / v.merge**2
        values += merged * v.merged_width * (1 if again else 10)  # two stages; of pictures no two frames become one
    return each * values
