"""Which kernels a run uses, and why: one line an operation, from the model as it is spread on this rank.

Called by doctor_command.py, which prints it, and training.py, which keeps it in run.json and the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from erniekit.errors import ConfigError
from erniekit.kernels.selection import (
    AttentionFacts,
    Choice,
    ExpertFacts,
    Fp8Facts,
    FrameFacts,
    HeadFacts,
    ProductFacts,
    documents_apart,
    idle,
    only,
    select,
)
from erniekit.kernels.stored import PLAIN, kind_named
from erniekit.log import emit
from erniekit.lora.layers import LoRAExperts, LoRALinear
from erniekit.model_contract import bare
from erniekit.models.layers.attention import InnerAttention
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.vision import VisionTower
from erniekit.optim.adamw import AdamW
from erniekit.recipes.built import Built
from erniekit.train.step import results_come_late
from erniekit.weight_kinds import BF16

_GENERATING = {"paged attention", "experts of few tokens"}  # of the server's engine, by which an evaluation generates


def kernel_table(built: Built, optimizer: AdamW) -> list[Choice]:
    try:
        table = [*_layers(built), *_run(built, optimizer)]
    except ValueError as problem:
        raise ConfigError(
            str(problem), where="kernels", fix="leave that operation out, or choose another implementation"
        ) from None
    generates = built.plan.config.train.eval_generate
    for word in idle({choice.operation for choice in table} | (_GENERATING if generates else set())):
        of = "the layers of the first pipeline stage have" if built.world.layout.pp > 1 else "this run has"
        emit(f"note     kernels: {word} has no effect: {of} no such operation")
    return table


def _layers(built: Built) -> Iterator[Choice]:
    device, dtype = built.device.handle, built.dtype
    parts: list[Any] = built.engine.parts
    modules = [module for part in parts for module in part.modules()]
    layers = [layer for part in parts for _, layer in part.held_layers()]
    if layers:
        yield from _attention(built, [layer.attn.inner for layer in layers], device)
    tower = next((m for m in modules if isinstance(m, VisionTower)), None)
    if tower is not None:
        yield select("frame attention", FrameFacts(device, dtype, tower.shape.head_dim))
    # One of another family may have a forward of its own.
    mlp = next((m for m in modules if isinstance(m, MLP) and type(m).forward is MLP.forward), None)
    if mlp is not None:
        yield select("feed-forward", mlp.kernel_facts(device))
    experts = next((m for m in modules if isinstance(m, Experts)), None)
    if experts is not None:
        yield from _experts(experts, device, dtype)
    yield from _fp8([m for m in modules if isinstance(m, Linear)], device)
    if parts[-1].last:
        weight, bias = parts[-1].head_weight(), parts[-1].head_bias_or_none()
        yield select("head", HeadFacts(device, dtype, weight.shape[0], bias is not None))


def _attention(built: Built, inners: list[Any], device: torch.device) -> Iterator[Choice]:
    """One layer whose documents are attended to in steps is enough: all of a batch have the same kernel."""
    config, in_steps = built.folder.config, [_why_in_steps(inner, built.dtype) for inner in inners]
    why, listed = next(filter(None, in_steps), None), built.world.layout.cp > 1
    group = config.num_heads // config.num_kv_heads
    facts = AttentionFacts(device, group, config.head_dim, listed=listed, dtype=built.dtype, apart=why is not None)
    set_to = built.plan.config.model.attention
    for operation in ("packed attention",) if listed else ("attention", "packed attention"):
        if why is None:
            yield select(operation, facts)
        elif set_to == "reference":
            yield only(operation, set_to, why)
        elif operation == "attention" or set_to == "sdpa":
            yield only(operation, "sdpa", why)
        else:
            yield only(operation, "flash" if set_to == "varlen" else documents_apart(facts), why)


def _why_in_steps(inner: Any, dtype: torch.dtype) -> str | None:
    if not isinstance(inner, InnerAttention):
        return f"{type(inner).__name__}: heads are spread unevenly over ranks"
    if not inner.with_positions:
        return "only the inner attention is recomputed in the backward pass"
    if inner.backend != "auto":
        return f"attention: {inner.backend}"
    return "kernels for a card take 16-bit numbers" if dtype == torch.float32 else None


def _experts(experts: Experts, device: torch.device, dtype: torch.dtype) -> Iterator[Choice]:
    updates = {**experts.gate_up.updates(), **experts.down.updates()}
    gate_up, down = bare(experts.gate_up), bare(experts.down)
    ranks = tuple(update.A.shape[1] for update in updates.values())
    facts = ExpertFacts(device, dtype, gate_up.in_features, down.in_features, ranks)
    of = {
        "grouped products": ProductFacts(device, dtype),
        "experts' fp8 products": Fp8Facts(device, gate_up.in_features, gate_up.out_features, experts=True),
        "experts' products with updates": facts if updates else None,
    }
    yield select("experts", facts)
    for operation in kind_named(gate_up.multiplied_as).expert_operations:
        if (known := of.get(operation)) is not None:
            yield select(operation, known)


def _fp8(linears: list[Linear], device: torch.device) -> Iterator[Choice]:
    """Of the linears that are multiplied in fp8, the most common choice and how many have another."""
    mine = [m for m in linears if "fp8 products" in kind_named(m.multiplied_as).operations]
    found = [select("fp8 products", Fp8Facts(device, m.in_features, m.out_features)) for m in mine]
    if found:
        first, count = Counter(found).most_common(1)[0]
        others = f"; {len(found) - count} of {len(found)} otherwise" if count < len(found) else ""
        yield first._replace(reason=first.reason + others)
    elif any(m.rounding is not None for m in linears):
        yield only("fp8 products", "multiplied out", "use_fp8: no block-wise kernel, the numbers are the same")


def _run(built: Built, optimizer: AdamW) -> Iterator[Choice]:
    """What is decided for the whole run, with the reasons its notes give."""
    cfg = built.plan.config
    reasons = {note.key: note.reason for note in cfg.notes}
    yield from _frozen(built, reasons) if cfg.lora.packed_base else _weights(built, reasons)
    for key, operation in (("compile", "compiled layers"), ("cuda_graph", "CUDA graphs")):
        on = "yes" if getattr(cfg.model, key) else "no"
        yield Choice(operation, on, reasons.get(key, f"{key}: {getattr(cfg.model, key)}"))
    fused, islands = optimizer.fused is not None, built.world.islands is not None
    update, why = ("one launch", "the fastest") if fused else ("torch", "for NVIDIA cards with Triton")
    yield Choice("AdamW", update, why)
    why = "unlike devices agree on each step first" if fused and islands else "the host reads them before it goes on"
    if late := results_come_late(optimizer, built.world):
        why = "nothing between two steps needs them"
    yield Choice("results of a step", "with the next" if late else "at once", why)


def _weights(built: Built, reasons: Mapping[str, str]) -> Iterator[Choice]:
    dtype = built.dtype if built.lora else built.plan.stored_dtype
    reason = reasons.get("frozen_base", "as configured")
    yield Choice("frozen weights" if built.lora else "weights", _name(dtype), reason)


def _frozen(built: Built, reasons: Mapping[str, str]) -> Iterator[Choice]:
    """Of a packed base: what this rank's layers with adapters took of it."""
    lora, dtype = built.plan.config.lora, _name(built.dtype)
    parts: list[Any] = built.engine.parts
    kinds = [m.base.kind for part in parts for m in part.modules() if isinstance(m, (LoRALinear, LoRAExperts))]
    packed = [kind for kind in kinds if kind != PLAIN]
    if not packed and kinds:
        yield Choice("frozen weights", dtype, f"{lora.frozen_base} takes the widths of none of them")
        return
    plain = f"; {len(kinds) - len(packed)} of {len(kinds)} stay {dtype}" if len(packed) < len(kinds) else ""
    yield Choice("frozen weights", lora.frozen_base, reasons.get("frozen_base", "as configured") + plain)
    if any(kind_named(kind).rows_in_fp8 for kind in packed):
        yield Choice("frozen products", "fp8", reasons.get("frozen_products", "as configured"))
    elif built.dtype == torch.bfloat16 and lora.frozen_products == BF16:
        yield Choice("frozen products", BF16, reasons.get("frozen_products", "as configured"))
    else:
        why = "no width for fp8 among them" if lora.frozen_products == "fp8" else "unpacked to what the run computes in"
        yield Choice("frozen products", dtype, why)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lines(table: list[Choice]) -> list[str]:
    """In columns, for a screen."""
    first, second = (max(len(choice[column]) for choice in table) for column in (0, 1))
    return [f"{c.operation:<{first}}  {c.implementation:<{second}}  {c.reason}" for c in table]
