"""Form pages: which of the declared keys each page's form has, and the pages of the training stages. Used by forms.py.

A stage has the keys of every training and its own: those that it reads by config's tables (loss_table.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from erniekit.config.flat import KEYS
from erniekit.loss_table import OF_KTO, PREFERENCE_KEYS, SCORE_KEYS


@dataclass(frozen=True)
class PageKeys:
    command: str
    fixed: dict[str, Any]
    needed: tuple[str, ...]
    sections: tuple[str, ...] = ()  # every key of these
    keys: tuple[str, ...] = ()  # and these; they are the basic ones where no section is named
    defaults: dict[str, Any] = field(default_factory=dict)  # where the key's own would surprise


# What stands for "not given" where a key's default would not: a folder of its own, all devices that share a copy.
UNSET: dict[str, Any] = {"output_dir": "", "sharding_parallel_degree": -1}

_TRAIN = (
    "model", "data", "train", "lora", "tuning", "optim", "precision", "memory", "checkpoint", "tracking", "parallel",
    "moe",
)  # fmt: skip
_LAUNCH = ("nproc_per_node", "devices", "max_restarts")
_NEEDS = ("model_name_or_path", "train_dataset_path")


def _of_section(section: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(k.name for k in KEYS.values() if k.section == section and k.name not in without)


# What a stage reads besides the keys of every training.
_OWN: dict[str, tuple[str, ...]] = {
    "SFT": _of_section("distill"),
    "DPO": _of_section("dpo", without=OF_KTO),
    "KTO": PREFERENCE_KEYS["KTO"],
    "RM": (*PREFERENCE_KEYS["RM"], *SCORE_KEYS["RM"]),
    "CLS": (*PREFERENCE_KEYS["CLS"], *SCORE_KEYS["CLS"]),
    "PT": (),
    "VL-SFT": _of_section("vision"),
}
STAGES = {stage: "train." + stage.lower().replace("-", "_") for stage in _OWN}

# One row of a file for each stage, as the page shows them.
ROWS = {
    "SFT": '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
    "DPO": '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}',
    "KTO": '{"prompt": "2 + 2?", "completion": "4", "label": true}',
    "RM": '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}',
    "CLS": '{"text": "What is a loss?", "label": "en"}',
    "PT": '{"text": "Two and two are four."}',
    "VL-SFT": (
        '{"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}, '
        '{"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "A cat."}]}'
    ),
}


def _stage_page(stage: str) -> PageKeys:
    needs = _NEEDS[:1] if stage == "PT" else _NEEDS  # text may come from input_dir as well
    # As config's rules for a recipe that does not name it.
    defaults = {"fine_tuning": "Full"} if stage == "PT" or stage in SCORE_KEYS else {}
    return PageKeys("train", {"stage": stage}, needs, _TRAIN, (*_LAUNCH, *_OWN[stage]), defaults)


PAGES: dict[str, PageKeys] = {
    **{page: _stage_page(stage) for stage, page in STAGES.items()},
    "evaluate": PageKeys(
        "eval",
        {},
        ("model_name_or_path", "eval_dataset_path"),
        keys=(
            "model_name_or_path", "lora_path", "eval_dataset_path", "eval_dataset_type", "max_seq_len", "batch_size",
            "max_evaluate_steps", "compute_type", "device", "stage", "output_dir", "override_base",
        ),
    ),
    "chat": PageKeys(
        "server",
        {},
        ("model_name_or_path",),
        keys=(
            "model_name_or_path", "lora_path", "lora_modules", "engine", "port", "compute_type", "device",
            "max_model_len", "max_new_tokens", "temperature", "top_p", "repetition_penalty", "enable_thinking",
            "max_num_seqs", "served_model_name", "override_base",
        ),
        defaults={"port": 0},
    ),
    "export": PageKeys(
        "export",
        {},
        ("output_dir",),
        keys=(
            "output_dir", "model_name_or_path", "lora_path", "save_format", "max_shard_size", "copy_tokenizer",
            "override_base",
        ),
    ),
    "split": PageKeys(
        "split",
        {},
        ("output_dir",),
        keys=("output_dir", "model_name_or_path", "save_format", "max_shard_size", "copy_tokenizer"),
    ),
}  # fmt: skip
