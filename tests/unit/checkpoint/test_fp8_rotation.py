"""The rotation of exported FP8 weights is compressed-tensors' own, and no other is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.quantised import _rotations
from erniekit.errors import CheckpointError
from erniekit.kernels.fp8_qat import hadamard
from erniekit.quantize.fp8_static import ROTATED, rotation_config

LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.shared_experts.up_proj")


def test_compressed_tensors_reads_our_words_and_has_our_matrix():
    transform = pytest.importorskip("compressed_tensors.transform")
    matrices = pytest.importorskip("compressed_tensors.transform.utils.hadamard")
    read = transform.TransformConfig.model_validate(rotation_config(32))
    (scheme,) = read.config_groups.values()
    assert (scheme.type, scheme.head_dim, scheme.randomize) == ("hadamard", 32, False)
    theirs = matrices.deterministic_hadamard_matrix(32, torch.float32, torch.device("cpu")) / 32**0.5
    torch.testing.assert_close(hadamard(32, torch.device("cpu")), theirs)


def test_linears_are_rotated_and_experts_are_not():
    ((targets, size),) = _rotations({"transform_config": rotation_config(32)}, Path("x"))
    assert (targets, size) == ([ROTATED], 32)
    match = pytest.importorskip("compressed_tensors.utils.match").match_name
    assert all(match(f"model.layers.3.{name}", ROTATED) for name in LINEARS)
    assert not any(match(f"model.layers.3.mlp.experts.5.{p}_proj", ROTATED) for p in ("gate", "up", "down"))
    assert not match("model.layers.3.mlp.gate", ROTATED)


@pytest.mark.parametrize(
    "change", [{"type": "random-hadamard"}, {"randomize": True}, {"head_dim": 48}, {"head_dim": None}, {"apply": []}]
)
def test_another_rotation_is_refused(change):
    words = rotation_config(32)
    words["config_groups"]["rotation"].update(change)
    with pytest.raises(CheckpointError, match="transform_config") as e:
        _rotations({"transform_config": words}, Path("x"))
    assert e.value.fix
