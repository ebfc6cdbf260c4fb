"""The proof that comes with a GGUF file: it reads back as written, and how far its outputs are from the source's.

Called by export/run.py on the file it has written and not yet published.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import KEPT_ROWS, Probe
from erniekit.checkpoint.probe import allowed as probe_tolerance
from erniekit.export.gguf.run import GgufWeights
from erniekit.export.streamed import streamed
from erniekit.export.verify import FP32_RELATIVE, SameExperts, default_ids, largest, require
from erniekit.lora.adapter import Adapter


@dataclass(frozen=True)
class GgufProof:
    """kl: mean over the tested tokens, in nats, of the file's next-token distribution from the source's."""

    kl: float
    largest: float  # difference of two logits
    tokens: int
    saved: float | None = None
    saved_allowed: float = 0.0

    def lines(self, merged: str) -> list[str]:
        """`merged`: what was put on the base, as text; empty for a model as it was."""
        source = f"base + {merged}" if merged else "the source"
        out = [
            "every tensor reads back as written",
            f"answers of the file against {source}: mean KL {self.kl:.1e} over {self.tokens} tokens, "
            f"logits within {self.largest:.1e}",
        ]
        if self.saved is not None:
            out.append(f"the checkpoint's own probe within {self.saved:.1e} (allowed {self.saved_allowed:.1e})")
        return out


@torch.no_grad()
def prove_gguf(source: ModelFolder, adapter: Adapter | None, written: GgufWeights, probe: Probe | None) -> GgufProof:
    """Raises CheckpointError unless the file is what it should be.

    Only fp32 has a bound on its outputs: what rounding does to those of a smaller type is stated, not judged."""
    written.check()
    ids = default_ids(source.config.vocab_size) if probe is None else probe.ids
    exact = written.plan.kind.name == "F32"
    experts = SameExperts() if exact else None
    want = _logits(streamed(source, adapter), ids, experts)
    got = _logits(written.model(), ids, experts)
    difference = largest(got - want)
    allowed = FP32_RELATIVE * max(10.0, largest(want)) if exact else torch.finfo(torch.float32).max
    require(difference, allowed, "the file does not answer as its source", source, adapter)
    first, second = want.log_softmax(-1), got.log_softmax(-1)
    kl = max(0.0, float((first.exp() * (first - second)).sum(-1).mean()))
    if probe is None or probe.rows is None:
        return GgufProof(kl, difference, ids.numel())
    saved, saved_allowed = probe.difference(want[-KEPT_ROWS:]), probe_tolerance(probe, source.dtype())
    require(saved, saved_allowed, "the weights do not answer as the checkpoint did when saved", source, adapter)
    return GgufProof(kl, difference, ids.numel(), saved, saved_allowed)


def _logits(model: nn.Module, ids: torch.Tensor, experts: SameExperts | None) -> torch.Tensor:
    logits: torch.Tensor = experts.run(model, ids) if experts else model(ids)[0]
    model.to("meta")  # its hooks hold it in a circle: the weights must not wait for the collector
    return logits
