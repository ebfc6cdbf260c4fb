"""The proof that comes with an export: merged logits equal base + adapter, and every other tensor is bit-identical.

Called by run.py on the folder it has written and not yet published.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import FILE as PROBE_FILE
from erniekit.checkpoint.probe import KEPT_ROWS, Probe
from erniekit.checkpoint.probe import allowed as probe_tolerance
from erniekit.errors import CheckpointError
from erniekit.export.streamed import streamed
from erniekit.lora.adapter import Adapter
from erniekit.models.layers.router import Router, Routing

PROBE_TOKENS = 32
# fp32 sums in another order: two stacks agree to 1e-5 on logits near 10.
FP32_RELATIVE = 1e-5
# The largest of some thousand rounding effects is taken from one draw of them; another draw stays well below this.
ROUNDING_MARGIN = 4.0


@dataclass(frozen=True)
class Proof:
    """Largest differences met, and what was allowed. A copy has none; `saved` is None where no probe was stored."""

    merged: float
    merged_allowed: float
    saved: float | None = None
    saved_allowed: float = 0.0

    def lines(self, merged: str) -> list[str]:
        """`merged`: what was put on the base, as text; empty for a copy."""
        out = ["every tensor bit-identical to its source"]
        if merged:
            out = [f"merged logits within {self.merged:.1e} of base + {merged} (allowed {self.merged_allowed:.1e})"]
        if self.saved is not None:
            out.append(f"the checkpoint's own probe within {self.saved:.1e} (allowed {self.saved_allowed:.1e})")
        return out


def default_ids(vocab_size: int) -> torch.Tensor:
    """Any tokens will do: the check compares two models on them. [1, PROBE_TOKENS]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (1, PROBE_TOKENS), generator=generator)


@torch.no_grad()
def prove(
    base: ModelFolder, adapter: Adapter | None, written: ModelFolder, changed: set[str], probe: Probe | None
) -> Proof:
    """Raises CheckpointError unless `written` is what it should be. `changed`: our names of the merged tensors."""
    same_tensors(base, written, changed)
    if adapter is None and probe is None:
        return Proof(0.0, 0.0)
    ids, more = (default_ids(base.config.vocab_size), {}) if probe is None else (probe.ids, probe.more())
    difference = allowed = 0.0
    experts = SameExperts()
    if adapter is not None:
        want = experts.run(streamed(base, adapter), ids, **more)
    got = experts.run(streamed(written), ids, **more)
    if adapter is not None:
        difference = largest(got - want)
        allowed = FP32_RELATIVE * max(10.0, largest(want))
        if base.dtype() != torch.float32:
            allowed += ROUNDING_MARGIN * largest(experts.run(_shaken(base, adapter, changed), ids, **more) - want)
        require(difference, allowed, "the merged weights do not answer as base + adapter", base, adapter)
    if probe is None or probe.rows is None:
        return Proof(difference, allowed)
    saved = probe.difference(got[-KEPT_ROWS:])
    saved_allowed = probe_tolerance(probe, written.dtype())
    require(saved, saved_allowed, "the exported weights do not answer as the checkpoint did when saved", base, adapter)
    return Proof(difference, allowed, saved, saved_allowed)


def same_tensors(base: ModelFolder, written: ModelFolder, changed: set[str]) -> None:
    """Streams both folders; every tensor but the merged ones has the same bits."""
    written.check_names()
    theirs = {e.ours: e for e in written.entries() if not e.copy_of}
    for entry in base.entries():
        if entry.copy_of or entry.ours in changed:
            continue
        if not _same_bits(base.read(entry), written.read(theirs[entry.ours])):
            raise CheckpointError(
                f"{entry.ours} changed on its way to the new folder; nothing was published",
                where=str(written.path),
                fix="check the disk and the memory of this machine, then export again",
            )


class SameExperts:
    """Runs models with the experts the first of them chose: rounding may tip a choice between two that are nearly
    equal, which moves logits by far more than rounding does and is no error of the merge."""

    def __init__(self) -> None:
        self.chosen: dict[str, torch.Tensor] = {}

    def run(self, model: nn.Module, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        for name, module in model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(partial(self._follow, name.removesuffix(".base")))
        logits: torch.Tensor = model(ids, **more)[0]
        return logits

    def _follow(self, name: str, router: Router, _: object, mine: Routing) -> Routing:
        ids = self.chosen.setdefault(name, mine.ids)
        weights = mine.probs.gather(1, ids.clamp(max=router.experts - 1)) * (ids < router.experts)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.norm_min)
        return mine._replace(ids=ids, weights=weights.to(mine.weights.dtype))


def _shaken(base: ModelFolder, adapter: Adapter, changed: set[str]) -> nn.Module:
    """Base + adapter with each adapted weight moved at random within half a unit of its last place: what
    rounding the merged weights to their dtype may do, measured on this very model."""
    half_unit = torch.finfo(base.dtype()).eps / 2

    def moved(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name not in changed:
            return weight
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
        noise = torch.empty_like(weight).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
        return weight * (1 + half_unit * noise)

    return streamed(base, adapter, moved)


def largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8) if t.ndim else t.reshape(1).view(torch.uint8)


def require(difference: float, allowed: float, what: str, base: ModelFolder, adapter: Adapter | None) -> None:
    if not difference <= allowed:  # NaN fails, too
        raise CheckpointError(
            f"{what}: logits differ by {difference:.2e}, allowed {allowed:.2e}; nothing was published",
            where=str(base.path),
            fix=_way_out(base, adapter),
        )


def _way_out(base: ModelFolder, adapter: Adapter | None) -> str:
    apart = f"export it from a folder of its own, with its config.json, tokenizer and weights but without {PROBE_FILE}"
    if names := base.edited:
        are = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not as saved"
        return f"{are}: put that back, or if you changed it on purpose, {apart}"
    if adapter is not None:
        return "check that model_name_or_path is the base the adapter was trained on"
    return f"use another checkpoint of the run, or if you changed this model on purpose, {apart}"
