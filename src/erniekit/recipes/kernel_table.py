"""Which kernels a run uses, and why: one line an operation, from the model as it is spread on this rank.

Called by doctor.py, which prints it, and training.py, which keeps it in run.json and the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from erniekit.errors import ConfigError
from erniekit.kernels import quack_gemm
from erniekit.kernels.selection import AttentionFacts, Choice, ExpertFacts, Fp8Facts, ProductFacts, select
from erniekit.kernels.stored import kind_named
from erniekit.model_contract import bare
from erniekit.models.layers.attention import InnerAttention
from erniekit.models.layers.experts import Experts
from erniekit.models.layers.linear import Linear
from erniekit.models.layers.mlp import MLP
from erniekit.recipes.built import Built


def kernel_table(built: Built, fused_update: bool) -> list[Choice]:
    """fused_update: whether the optimiser has a kernel of its own."""
    try:
        return [*_layers(built), *_run(built, fused_update)]
    except ValueError as problem:
        raise ConfigError(
            str(problem), where="kernels", fix="leave that operation out, or choose another implementation"
        ) from None


def _layers(built: Built) -> Iterator[Choice]:
    device, dtype, config = built.device.handle, built.dtype, built.folder.config
    parts: list[Any] = built.engine.parts
    modules = [module for part in parts for module in part.modules()]
    first = next((layer for part in parts for _, layer in part.held_layers()), None)
    if first is not None:
        yield from _attention(built, first.attn.inner, device)
    mlp = next((m for m in modules if isinstance(m, MLP)), None)
    if mlp is not None:
        yield select("feed-forward", mlp.kernel_facts(device))
    experts = next((m for m in modules if isinstance(m, Experts)), None)
    if experts is not None:
        yield select("experts", _expert_facts(experts, device, dtype))
        gate_up = bare(experts.gate_up)
        if kind_named(gate_up.kind).rows_in_fp8:
            facts = Fp8Facts(device, gate_up.in_features, gate_up.out_features, experts=True)
            yield select("experts' fp8 products", facts)
        else:
            yield select("grouped products", ProductFacts(device, dtype))
            if experts.down.updates():
                yield select("experts' products with updates", _expert_facts(experts, device, dtype))
    rounded = [m for m in modules if isinstance(m, Linear) and m.rounding is not None]
    if rounded and built.plan.config.precision.compute_type == "fp8":
        yield select("fp8 products", Fp8Facts(device, rounded[0].in_features, rounded[0].out_features))
    elif rounded:
        yield Choice("fp8 products", "multiplied out", "use_fp8: no block-wise kernel, the numbers are the same")
    if parts[-1].last:
        wide = config.vocab_size >= quack_gemm.WIDE
        found = select("head", ProductFacts(device, dtype))
        yield found if wide else Choice("head", "torch", f"fewer than {quack_gemm.WIDE} columns")


def _attention(built: Built, inner: Any, device: torch.device) -> Iterator[Choice]:
    config, why = built.folder.config, None
    if not isinstance(inner, InnerAttention):
        why = f"{type(inner).__name__}: heads are spread unevenly over ranks"
    elif not inner.with_positions:
        why = "only the inner attention is recomputed in the backward pass"
    elif inner.backend != "auto":
        why = f"attention: {inner.backend}"
    elif built.dtype == torch.float32:
        why = "kernels for a card take 16-bit numbers"
    listed = getattr(inner, "all_keys", None) is not None
    facts = AttentionFacts(device, config.num_heads // config.num_kv_heads, config.head_dim, listed=listed)
    for operation in ("packed attention",) if listed else ("attention", "packed attention"):
        yield Choice(operation, "sdpa", why) if why else select(operation, facts)


def _expert_facts(experts: Experts, device: torch.device, dtype: torch.dtype) -> ExpertFacts:
    updates = {**experts.gate_up.updates(), **experts.down.updates()}
    gate_up, down = bare(experts.gate_up), bare(experts.down)
    ranks = tuple(update.A.shape[1] for update in updates.values())
    return ExpertFacts(device, dtype, gate_up.in_features, down.in_features, ranks)


def _run(built: Built, fused_update: bool) -> Iterator[Choice]:
    """What is decided for the whole run, with the reasons its notes give."""
    cfg = built.plan.config
    reasons = {note.key: note.reason for note in cfg.notes}
    dtype = built.dtype if built.lora else built.plan.stored_dtype
    kind = cfg.lora.frozen_base if cfg.lora.packed_base else str(dtype).removeprefix("torch.")
    yield Choice("frozen weights" if built.lora else "weights", kind, reasons.get("frozen_base", "as configured"))
    if cfg.lora.packed_base:
        yield Choice("frozen products", cfg.lora.frozen_products, reasons.get("frozen_products", "as configured"))
    for key, operation in (("compile", "compiled layers"), ("cuda_graph", "CUDA graphs")):
        on = "yes" if getattr(cfg.model, key) else "no"
        yield Choice(operation, on, reasons.get(key, f"{key}: {getattr(cfg.model, key)}"))
    update = "one launch" if fused_update else "torch"
    yield Choice("AdamW", update, "the fastest" if fused_update else "for NVIDIA cards with Triton")
    late = fused_update and built.device.asynchronous
    reason = "nothing between two steps needs them" if late else "the host reads them before it goes on"
    yield Choice("results of a step", "with the next" if late else "at once", reason)


def lines(table: list[Choice]) -> list[str]:
    """In columns, for a screen."""
    first, second = (max(len(choice[column]) for choice in table) for column in (0, 1))
    return [f"{c.operation:<{first}}  {c.implementation:<{second}}  {c.reason}" for c in table]
