"""CASES of `erniekit bench --real`: a model's shape, the keys a user would write, and the rows. Read by real.py and
command.py; no torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from erniekit.bench.workloads import FULL, LORA, TINY_PICTURE, WORKLOADS, tiny_model
from erniekit.errors import ConfigError
from erniekit.models.released import ERNIE_03B, ERNIE_21B
from erniekit.printable import counted


@dataclass(frozen=True)
class RealCase:
    name: str
    about: str
    model: Mapping[str, Any]
    keys: Mapping[str, Any]
    rows: tuple[int, int] = (5000, 7500)  # tokens of each row, from and to
    count: int = 400  # of rows
    answer: int = 0  # tokens of each of two answers: rows are preferences
    picture: int = 0  # tokens of the picture that each row begins with, among its own
    steps: int = 60
    aim: float | None = None  # real tokens a second on one H200


_PAIRS: dict[str, Any] = {**FULL, "stage": "DPO", "max_prompt_len": 4096}
_LORA_8K = {**LORA, "max_seq_len": 8192, "packing": False}
_V1 = WORKLOADS["V1"]
PIXELS = 28 * 28  # of a picture, for each of its tokens
_CASES = (
    RealCase(
        "sft", "0.3B, every weight, 8K, packing off", ERNIE_03B, {**FULL, "max_seq_len": 8192, "packing": False},
        steps=120, aim=110e3,
    ),
    RealCase(  # documents as long as A2's
        "sft-packed", "0.3B, every weight, rows of about 1K packed to 32K", ERNIE_03B, {**FULL, "max_seq_len": 32768},
        rows=(512, 1537), count=2400, aim=208e3,
    ),
    RealCase("lora", "21B-A3B, LoRA, 8K, packing off", ERNIE_21B, _LORA_8K, aim=25.2e3),
    RealCase("lora-fp8", "the same over fp8 weights", ERNIE_21B, {**_LORA_8K, "frozen_base": "fp8"}, aim=29.5e3),
    RealCase(
        "dpo", "0.3B, every weight, DPO, four pairs of 4K packed", ERNIE_03B, {**_PAIRS, "max_seq_len": 16384},
        rows=(3000, 3001), answer=512, aim=135e3,
    ),
    RealCase(
        "dpo-rows", "0.3B, every weight, DPO, four pairs of many lengths, packing off", ERNIE_03B,
        {**_PAIRS, "max_seq_len": 4608, "packing": False, "batch_size": 4}, rows=(1500, 3072), answer=512,
    ),
    RealCase(  # five rows a pack, as V1 has them: with the template's tokens they are a little longer
        "vl-lora", "VL-28B-A3B, LoRA, tower frozen, packed 8K, a picture of 1000 tokens in each row", _V1.model,
        {**_V1.keys, "max_seq_len": _V1.rows.length, "max_pixels": PIXELS * _V1.rows.picture}, rows=(1600, 1601),
        picture=_V1.rows.picture, aim=_V1.target,
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def chosen(names: Sequence[str]) -> list[RealCase]:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        fix = f"choose from: {', '.join(CASES)}"
        raise ConfigError(f"no case {unknown[0]!r}", where="erniekit bench --real --only", fix=fix)
    return [CASES[name] for name in names] or list(CASES.values())


def tiny(case: RealCase) -> RealCase:
    """Small enough for a CPU: whether the command runs, not how fast."""
    model = {**tiny_model(case.model), "vocab_size": 1280}
    keys = {**case.keys, "max_seq_len": 256, "compute_type": "fp32", "device": "cpu", "dataset_num_proc": 1}
    keys |= {"max_prompt_len": 128} if case.answer else {}
    keys |= {"max_pixels": PIXELS * TINY_PICTURE, "media_num_proc": 1} if case.picture else {}
    keys.pop("frozen_base", None)
    rows = (64, 96) if case.answer or case.picture else (100, 200)
    answer, picture = 16 if case.answer else 0, TINY_PICTURE if case.picture else 0
    return replace(case, model=model, keys=keys, rows=rows, answer=answer, picture=picture, count=24, steps=4, aim=None)


def cut(case: RealCase, layers: int) -> RealCase:
    """A model with experts of so many layers, where the whole one takes too long or too much memory."""
    if not layers or "moe_num_experts" not in case.model:
        return case
    last = [layers - 1] * 2 if case.picture else layers - 1  # of text and vision
    model = {**case.model, "num_hidden_layers": layers, "moe_layer_end_index": last}
    return replace(case, model=model, about=f"{case.about}, {counted(layers, 'layer')}", aim=None)
