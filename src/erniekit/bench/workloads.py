"""WORKLOADS: what is measured. Shapes of real models, the keys a user would write, the data, and the peers.

Read by command.py and worker.py; no torch here, so that the list prints at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from erniekit.errors import ConfigError
from erniekit.models.released import ERNIE_03B, ERNIE_21B, ERNIE_300B, ERNIE_VL_28B, LLAMA_13B_LAYERS
from erniekit.registry import nearest

LLAMA_13B = LLAMA_13B_LAYERS
# What makes any of them small enough for a CPU; the kind of model stays.
TINY: dict[str, Any] = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16
)
TINY_VL: dict[str, Any] = dict(
    moe_num_experts=[8, 8], moe_k=2, moe_intermediate_size=[32, 16], moe_layer_end_index=[1, 1], freq_allocation=2,
    im_patch_id=10, image_start_token_id=11, image_end_token_id=12, video_start_token_id=13, video_end_token_id=14,
    video_token_id=15, vision_config=dict(depth=2, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=14),
)  # fmt: skip
TINY_PICTURE = 6  # tokens
TINY_EXPERTS: dict[str, Any] = dict(moe_num_experts=8, moe_k=2, moe_intermediate_size=32, moe_layer_end_index=1)

# A CPU has no driver for Liger, and takes half a minute to compile.
ON_A_CARD = ("hf+compile", "hf+fa4", "hf+liger", "hf+liger+fp32")

FULL = {"fine_tuning": "Full"}
LORA = {"fine_tuning": "LoRA", "lora_rank": 32}
VL_SFT = {**LORA, "stage": "VL-SFT", "freeze_config": "freeze_vision", "vision_feature_cache": "off"}
WINT = {**LORA, "compute_type": "wint4/8"}
IN_FP8 = {"frozen_products": "fp8"}
EXACT = {"master_weights": "exact16", "optim_states": "8bit", "update_in_backward": True}
LIGHT = {**EXACT, "master_weights": "none"}


def within(gib: float) -> dict[str, Any]:
    """As few layers recomputed as fit this much memory."""
    return {"recompute": True, "recompute_granularity": "auto", "memory_limit": gib}


@dataclass(frozen=True)
class Rows:
    """The data of a step. One document a row, or documents of about `mean` tokens end to end; or preference pairs."""

    count: int  # rows a step
    length: int  # tokens a row
    mean: int = 0  # of the documents' log-normal lengths; 0: a row is one document
    spread: float = 0.4  # of their logarithm: the longest of 40 is about twice the mean, or eight times at 0.8
    masked: float = 0.0  # share of each document's labels that are not trained: its first ones
    pairs: int = 0  # preference pairs a row: one prompt and two answers each
    answer: int = 0  # tokens of each answer
    pictures: int = 0  # a row: each in a document of its own, all equally long
    picture: int = 0  # tokens of each picture
    in_files: bool = False  # they lie in files, and are decoded while steps run

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class Workload:
    name: str
    about: str
    model: Mapping[str, Any]  # config.json
    rows: Rows
    keys: Mapping[str, Any]  # of the run, besides the defaults
    peers: tuple[str, ...]  # measured unless others are named
    also: tuple[str, ...] = ()  # measured only by name
    recompute: bool = False  # whether the peers compute layers again in the backward pass
    together: bool = True  # weights and states of all trainers fit the card at once, so that turns alternate
    skew: bool = False  # the router prefers some experts, as Zipf's law has it
    limit_gib: float | None = None  # peak memory that is allowed
    target: float | None = None  # tokens (or pairs) a second to reach on one H200
    apart: Mapping[str, float] = field(default_factory=dict)  # how far from a peer is right, where not as parity.py has
    note: str = ""

    @property
    def stage(self) -> str:
        return str(self.keys.get("stage", "SFT"))

    @property
    def lora(self) -> bool:
        return self.keys["fine_tuning"] == "LoRA"

    @property
    def unit(self) -> str:
        """What `target` counts a second."""
        return "pairs" if self.rows.pairs and not self.lora else "tokens"

    @property
    def possible(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.peers, *self.also)))


_DENSE = ("hf", "hf+compile")
_BEST = ("hf+compile", "hf+fa4")  # where a step is long enough to hide what the second launches between its parts
_EXPERTS = ("unsloth", "peft-attention")
_8K, _32K, _128K = 8192, 32768, 131072
_PAIRS = Rows(1, _8K, pairs=2, answer=512)
_DPO = {"stage": "DPO", "max_prompt_len": 4096}
_TWO_WAYS = "a peer computes reference and policy by other kernels: tenths of 6000 nats, which its first loss is off by"
_ROUNDED = {"loss": 0.02, "logits": 0.6}
_OTHER_BASE = "over random weights in 4 bit: a peer's base is bf16, whose answers are not near"
_NO_128K = "hf is left out: it gave no step in five minutes at this length; --peers hf tries it"

_ALL = (
    Workload("A0", "0.3B, every weight, one document of 2K", ERNIE_03B, Rows(1, 2048), FULL, _DENSE, ("hf+fa4",)),
    Workload(
        "A1", "0.3B, every weight, one document of 8K", ERNIE_03B, Rows(1, _8K), FULL, _DENSE, ("hf+fa4",), target=118e3
    ),
    Workload("A1b", "the same, four rows a step", ERNIE_03B, Rows(4, _8K), FULL, _BEST, ("hf",), target=126e3),
    Workload(
        "A2-none", "0.3B, every weight, 32K of documents of about 1K, no label masked",
        ERNIE_03B, Rows(1, _32K, mean=1024), FULL, (*_DENSE, "hf+fa4"), target=210e3,
    ),
    Workload(
        "A2-half", "the same, half the labels masked",
        ERNIE_03B, Rows(1, _32K, mean=1024, masked=0.5), FULL, _BEST, ("hf",), target=235e3,
    ),
    Workload(
        "A2-wide", "none masked, some documents far longer: up to eight times the mean",
        ERNIE_03B, Rows(1, _32K, mean=1024, spread=0.8), FULL, _BEST, ("hf",),
    ),
    Workload(
        "B1-100", "0.3B, every weight, one document of 128K", ERNIE_03B, Rows(1, _128K), FULL, (), ("hf",),
        recompute=True, together=False, limit_gib=100, target=14e3, note=_NO_128K,
    ),
    Workload(
        "B1-30", "the same in 30 GiB, layers recomputed", ERNIE_03B, Rows(1, _128K), {**FULL, **within(30)}, (),
        ("hf",), recompute=True, together=False, limit_gib=30, target=12.5e3, note=_NO_128K,
    ),
    Workload(
        "C1-85", "21B-A3B, LoRA on attention, dense, shared and routed experts, one document of 8K",
        ERNIE_21B, Rows(1, _8K), LORA, _EXPERTS, ("peft",), together=False, limit_gib=85, target=24e3,
    ),
    Workload(
        "C1-60", "the same in 60 GiB, layers recomputed", ERNIE_21B, Rows(1, _8K), {**LORA, **within(60)}, ("unsloth",),
        ("peft", "peft-attention"), recompute=True, together=False, limit_gib=60, target=16e3,
    ),
    Workload(
        "C1-skew", "C1-85 with uneven experts", ERNIE_21B, Rows(1, _8K), LORA, ("unsloth",), ("peft-attention",),
        together=False, skew=True, limit_gib=85,
    ),
    Workload(
        "C1-fp8", "C1-85 over a frozen base in fp8", ERNIE_21B, Rows(1, _8K), {**LORA, "frozen_base": "fp8"},
        ("unsloth",), ("peft", "peft-attention"), together=False, limit_gib=54, target=30e3,
        apart={"loss": 0.01, "logits": 0.25}, note="every frozen product is off by 3.7 %, a peer's by 0.2 %",
    ),
    Workload(
        "C2-45", "C1-85 over 4- and 8-bit weights (wint4/8)", ERNIE_21B, Rows(1, _8K), WINT,
        ("unsloth-4bit", "unsloth"), together=False, limit_gib=45, target=24e3, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "C2-fp8", "the same, multiplied in fp8", ERNIE_21B, Rows(1, _8K), {**WINT, **IN_FP8},
        ("unsloth-4bit", "unsloth"), together=False, limit_gib=45, target=28e3, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "C2-32", "C2-fp8 in 32 GiB, layers recomputed", ERNIE_21B, Rows(1, _8K), {**WINT, **IN_FP8, **within(32)},
        ("unsloth",), recompute=True, together=False, limit_gib=32, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "C2-32k", "wint4/8, one document of 32K", ERNIE_21B, Rows(1, _32K), {**WINT, **IN_FP8, **within(80)},
        ("unsloth",), recompute=True, together=False, limit_gib=80, target=15e3, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "C2-128k", "wint4/8, one document of 128K", ERNIE_21B, Rows(1, _128K), {**WINT, **IN_FP8, **within(80)}, (),
        ("unsloth",), recompute=True, together=False, limit_gib=80, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "C2-dpo", "wint4/8, DPO with a live reference, 32K", ERNIE_21B, Rows(1, _32K, pairs=2, answer=2048),
        {**WINT, **IN_FP8, **_DPO, "max_prompt_len": 16384, **within(80)}, (), ("unsloth",), recompute=True,
        together=False, limit_gib=80, apart={**_ROUNDED, "loss": 0.5}, note=_TWO_WAYS,
    ),
    Workload(
        "C3", "21B-A3B, the same adapters, one document of 32K", ERNIE_21B, Rows(1, _32K), {**LORA, **within(110)},
        ("unsloth",), ("peft", "peft-attention"), recompute=True, together=False, limit_gib=110, target=13e3,
    ),
    Workload(
        "E1", "0.3B, every weight, DPO with a live reference, prompt 3072 + answers 512, four pairs a step",
        ERNIE_03B, Rows(1, 2 * _8K, pairs=4, answer=512), {**FULL, **_DPO}, ("hf", "hf+fa4"), ("hf+compile",),
        target=28,
    ),
    Workload(
        "E2-live", "21B-A3B, DPO with LoRA, 8K, live reference", ERNIE_21B, _PAIRS, {**LORA, **_DPO},
        ("unsloth",), ("peft-attention", "peft"), together=False, target=17e3, apart={"loss": 0.5}, note=_TWO_WAYS,
    ),
    Workload(
        "E2-cached", "the same, reference computed beforehand", ERNIE_21B, _PAIRS,
        {**LORA, **_DPO, "reference_logps": "cached"}, ("unsloth",), ("peft-attention", "peft"), together=False,
        target=23e3,
    ),
    Workload(
        "D1-exact", "21B-A3B, every weight, exact 16 + 16 bit masters, 8-bit moments, updates in backward", ERNIE_21B,
        Rows(1, _8K), {**FULL, **EXACT, "recompute": True}, (), ("hf",), together=False, recompute=True, target=12e3,
    ),
    Workload(
        "D1-light", "the same without masters, weights rounded by chance", ERNIE_21B, Rows(1, _8K),
        {**FULL, **LIGHT, **within(136)}, (), ("hf",), together=False, recompute=True, target=16e3,
    ),
    Workload(
        "D2", "300B-A47B, LoRA over wint4/8, layers that do not fit in host memory", ERNIE_300B, Rows(1, _8K),
        {**WINT, **IN_FP8, **within(134), "recompute_granularity": "full", "offload_optim": True}, (), ("unsloth",),
        together=False, recompute=True, limit_gib=136, target=1.2e3, apart=_ROUNDED, note=_OTHER_BASE,
    ),
    Workload(
        "F1", "Llama-13B shape, 8 layers, every weight, 4 x 4K", LLAMA_13B, Rows(4, 4096), {**FULL, "stage": "PT"},
        ("hf+liger", "hf+liger+fp32", "hf"), ("hf+compile", "hf+fa4"), together=False, target=38e3,
    ),
    Workload(
        "F1b", "the same, moments in 16 bit", LLAMA_13B, Rows(4, 4096),
        {**FULL, "stage": "PT", "use_lowprecision_moment": True}, ("hf+liger",), ("hf+liger+fp32", "hf"),
        together=False, target=38e3,
    ),
    Workload(
        "V1", "VL-28B-A3B, LoRA, tower frozen, 8K of five documents, 61 % of it pictures of 1000 tokens", ERNIE_VL_28B,
        Rows(1, _8K, pictures=5, picture=1000), VL_SFT, ("peft-vl",), together=False, limit_gib=95, target=18e3,
    ),
    Workload(
        "V1-cached", "V1 with cached features of pictures seen before: 1.3 times V1's speed", ERNIE_VL_28B,
        Rows(1, _8K, pictures=5, picture=1000), {**VL_SFT, "vision_feature_cache": "on"}, (), ("peft-vl",),
        together=False, limit_gib=95, target=1.3 * 18e3, note="features are in host memory; a run reads them from disk",
    ),
    Workload(
        "V1-input", "V1 with pictures in files, decoded while steps run: the share of time that steps wait for them",
        ERNIE_VL_28B, Rows(1, _8K, pictures=5, picture=1000, in_files=True), VL_SFT, (), together=False, limit_gib=95,
        target=18e3,
    ),
    Workload(
        "V1-32k", "the same, 32K of twenty documents", ERNIE_VL_28B, Rows(1, _32K, pictures=20, picture=1000),
        {**VL_SFT, **within(130)}, ("peft-vl",), recompute=True, together=False, limit_gib=130, target=11e3,
    ),
    Workload(
        "V1-text", "the same model, one document of 8K without a picture: 95 % of C1-85's speed", ERNIE_VL_28B,
        Rows(1, _8K), VL_SFT, ("peft-vl",), together=False, limit_gib=95, target=0.95 * 24e3,
    ),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _ALL}


def chosen(names: Iterable[str]) -> list[Workload]:
    """`C1` is every C1-..., `C1-60` one of them; none given is all, in the table's order."""
    patterns = [pattern.strip() for pattern in names if pattern.strip()]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in WORKLOADS):
            near = nearest(pattern, list(WORKLOADS))
            raise ConfigError(
                f"no workload {pattern!r}",
                where="--only",
                fix=f"did you mean {near[0]}?" if near else "choose from: " + ", ".join(WORKLOADS),
            )
    return [w for name, w in WORKLOADS.items() if not patterns or any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + "-")


def tiny_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same kind of model at a size a CPU trains."""
    experts = TINY_VL if "vision_config" in model else TINY_EXPERTS if "moe_k" in model else {}
    groups = 4 if model["num_key_value_heads"] == model["num_attention_heads"] else 2
    small = {**model, **TINY, **experts, "num_key_value_heads": groups}
    if "vision_config" in model:
        del small["head_dim"]  # it is hidden / heads there
    return small


def tiny(workload: Workload) -> Workload:
    """The same kind of work at a size a CPU does in a second; memory limits and targets are the real size's."""
    rows = workload.rows
    length = {2048: 32, _8K: 64, 2 * _8K: 128, _32K: 128, _128K: 192}.get(rows.length, 48)
    rows = replace(rows, length=length, mean=24 if rows.mean else 0, answer=8 if rows.pairs else 0)
    if rows.pictures:
        rows = replace(rows, pictures=min(rows.pictures, 4), picture=TINY_PICTURE)
    peers, also = (tuple(p for p in names if p not in ON_A_CARD) for names in (workload.peers, workload.also))
    keys = {**workload.keys, **({"lora_rank": 8} if workload.lora else {})}
    if keys.pop("memory_limit", None):  # where few fit: layers are recomputed here as well
        keys["recompute_granularity"] = "full"
    peers = peers or also[:1]  # what is too slow at the real size is not at this one
    packed = "frozen_base" in keys or str(keys.get("compute_type", "")).startswith("wint")
    apart = workload.apart if packed else {}  # else it is bf16 that rounds
    return replace(
        workload, model=tiny_model(workload.model), rows=rows, keys=keys, peers=peers, also=also, limit_gib=None,
        target=None, apart=apart, note="",
    )  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """How a workload is measured; travels to its process as JSON."""

    peers: tuple[str, ...] | None = None  # None: the workload's own
    steps: int = 8  # timed, of each
    warmup: int = 3
    tiny: bool = False
    profile: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)  # of our run, over the workload's
    seed: int = 0
    seconds: float | None = None  # left for this workload: later peers are not started beyond it
