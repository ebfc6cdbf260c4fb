"""Whether a peer computed what we did: the first steps' numbers and a probe's logits, same weights and same data.

Called by worker.py; a comparison of speeds is worth nothing without it.
"""

from __future__ import annotations

from typing import Any

import torch

from erniekit.bench.turns import Lane
from erniekit.bench.workloads import Workload

# bf16 rounds every activation to 0.4 %; over 18-28 layers logits of two right programs differ by 1-3 %, a token that
# falls to another expert by more. Losses are means over thousands of tokens, where most of that cancels.
TOLERANCES = {
    torch.bfloat16: {"loss": 0.01, "grad_norm": 0.05, "logps": 0.01, "logits": 0.06},
    torch.float32: {"loss": 1e-4, "grad_norm": 1e-3, "logps": 1e-4, "logits": 1e-3},
}


def compare(work: Workload, ours: Lane, peer: Lane, dtype: torch.dtype) -> dict[str, Any]:
    """Relative differences, and which of them are too large. Gradient norms only where both train every weight."""
    if not ours.first or not peer.first:
        return {}
    allowed = {**TOLERANCES[dtype], **work.apart}
    found: dict[str, float] = {}
    for name, mine in ours.first[0].items():
        theirs = peer.first[0].get(name)
        if theirs is not None and not (name == "grad_norm" and work.lora):
            found[name] = abs(mine - theirs) / max(abs(mine), 1e-12)
    if ours.logits is not None and peer.logits is not None:
        found["logits"] = float((ours.logits - peer.logits).norm() / ours.logits.norm())
    wrong = [name for name, value in found.items() if not value <= allowed[name.partition("/")[0]]]
    return {"differences": found, "equal": not wrong, "wrong": wrong}
