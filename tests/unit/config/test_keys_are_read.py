"""A key that is neither ignored nor of a later version changes something: code outside config/ reads it."""

from __future__ import annotations

import re
from pathlib import Path

import erniekit
from erniekit.config.flat import KEYS

SOURCE = Path(erniekit.__file__).parent
# Turned into other keys by a rule.
BY_RULES = {
    "dataset_type", "disable_ckpt_quant", "expert_tensor_parallel_degree", "from_scratch", "global_batch_size",
    "minimum_eval_times", "mix_schedule", "neftune", "sep_parallel_degree", "use_expert_parallel", "visual_ld",
    "warmup_ratio",
    "weight_quantize_algo",
    # checked against the number of files; evaluation then reads every row
    "eval_dataset_prob",
    # all their words are ignored or of a later version
    "pipeline_parallel_config", "sharding_parallel_config", "tensor_parallel_config",
}  # fmt: skip


def code() -> str:
    files = [p for p in SOURCE.rglob("*.py") if "config" not in p.relative_to(SOURCE).parts]
    return "\n".join(p.read_text() for p in files)


def test_every_key_of_this_version_is_read():
    text = code()
    read = set(re.findall(r"\.(\w+)", text)) | set(re.findall(r"\"(\w+)\"", text))
    assert {name for name, k in KEYS.items() if not k.not_yet} - read - BY_RULES == set()


def test_every_word_of_this_version_is_read():
    read = set(re.findall(r"\"(\w+)\"", code()))
    words = set(KEYS["unified_checkpoint_config"].choices) - set(KEYS["unified_checkpoint_config"].idle)
    assert words - {"enable_all_options"} - read == set()
    assert "offload" in read  # of `sharding`
