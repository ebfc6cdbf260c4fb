"""Rules on what the optimiser keeps of a weight, and when it updates it."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError


def cfg(*words: str) -> Any:
    return load(["model_name_or_path=x", "train_dataset_path=y", *words], "train")


def reason(run: Any, key: str) -> str:
    return next(note.reason for note in run.notes if note.key == key)


def test_erniekits_name_of_16_bit_moments_is_one_of_the_choices() -> None:
    assert cfg("use_lowprecision_moment=True").optim.optim_states == "bf16"
    assert cfg("optim_states=bf16").optim.use_lowprecision_moment
    assert cfg("compute_type=fp8").optim.optim_states == "bf16"
    both = cfg("compute_type=fp8", "optim_states=8bit")
    assert (both.optim.optim_states, both.optim.use_lowprecision_moment) == ("8bit", False)
    with pytest.raises(ConfigError, match="use_lowprecision_moment means optim_states: bf16"):
        cfg("use_lowprecision_moment=True", "optim_states=8bit")


def test_masters_of_fp32_weights_are_the_weights() -> None:
    assert cfg("master_weights=exact16").optim.master_weights == "exact16"
    for words in (("compute_type=fp32",), ("sharding=stage3", "sharding_parallel_degree=2")):
        run = cfg("master_weights=exact16", *words)
        assert run.optim.master_weights == "fp32"
        assert "fp32" in reason(run, "master_weights")


def test_updates_in_backward_clip_by_what_is_known_in_time() -> None:
    run = cfg("update_in_backward=True")
    assert run.optim.grad_clip == "previous"
    assert "known too late" in reason(run, "grad_clip")
    assert cfg("update_in_backward=True", "grad_clip=tensor").optim.grad_clip == "tensor"
    assert cfg("update_in_backward=True", "max_grad_norm=0", "grad_clip=global").optim.grad_clip == "global"
    assert cfg("grad_clip=tensor").optim.grad_clip == "global"
    for words in (("grad_clip=global",), ("gradient_accumulation_steps=4",)):
        with pytest.raises(ConfigError, match="update_in_backward") as caught:
            cfg("update_in_backward=True", *words)
        assert caught.value.fix


def test_8_bit_states_are_saved_as_they_are() -> None:
    run = cfg("optim_states=8bit", "ckpt_quant_stage=O1")
    assert run.checkpoint.ckpt_quant_stage == "O0"
    assert cfg("ckpt_quant_stage=O1").checkpoint.ckpt_quant_stage == "O1"
