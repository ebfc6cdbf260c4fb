"""Router losses: what keeps experts evenly used, fed into the gradient and never part of the reported loss.

Put into each MoE block by recipes/expert_layers.py. B rows, L length, H hidden, T = B * L tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.autograd_function import Function
from erniekit.kernels.moe_permute import count

METRICS = {"aux": "router_aux", "z": "router_z", "orthogonal": "router_ortho"}  # their names in the metrics


@dataclass(frozen=True)
class RouterLossWeights:
    """moe_aux_loss_lambda, moe_z_loss_lambda, moe_orthogonal_loss_lambda; one that is 0 costs nothing."""

    aux: float = 0.0
    z: float = 0.0
    orthogonal: float = 0.0

    def metric_names(self) -> tuple[str, ...]:
        return tuple(name for term, name in METRICS.items() if getattr(self, term))


class _Attach(Function):
    """y as it is; in backward the loss gets the gradient `share`, as if it had been added to the reported one."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(share)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (share,) = ctx.saved_tensors
        return grad, share, None


class RouterLosses(nn.Module):
    """The collaborator of one MoE block. Terms are means over a row's real tokens, so that the gradient does not depend
    on how rows are spread over micro-batches and ranks.

    share: fp32 [], what the sum of a row's terms is multiplied by; filled at every step.
    sum_over: sums over the ranks that hold other tokens of the same rows (backward: as it is), `parts` of them.
    piece: which of how many slices of a row this rank works on, under sequence parallelism.
    whole_batch: ERNIEKit's way, one mean over all positions of a micro-batch, padding too.
    modal: `ctx.real` marks this bank's own tokens; means are over those, and rows without one have no term.
    """

    def __init__(
        self,
        weights: RouterLossWeights,
        share: torch.Tensor,
        sum_over: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        parts: int = 1,
        piece: tuple[int, int] = (0, 1),
        whole_batch: bool = False,
        modal: bool = False,
    ) -> None:
        super().__init__()
        self.weights, self.share = weights, share
        self.sum_over, self.parts, self.piece, self.whole_batch = sum_over, parts, piece, whole_batch
        self.modal = modal

    def forward(self, y_BLH: torch.Tensor, routing: Any, router: Any, ctx: Any) -> torch.Tensor:
        if ctx.record is None:  # evaluation
            return y_BLH
        real = self._here(ctx.real, y_BLH.shape[1])
        with torch.no_grad():
            chosen = routing.ids if real is None else torch.where(real.reshape(-1, 1), routing.ids, router.experts)
            ctx.record["usage"] = count(chosen, router.experts)
        members = self._here(ctx.members, y_BLH.shape[1])
        terms = self._terms(routing, router, y_BLH.shape[0], real, members)
        loss = torch.zeros((), device=y_BLH.device)
        for term, (value, rows) in terms.items():
            ctx.record[METRICS[term]] = (value.detach(), rows)
            shared = self.parts if term == "orthogonal" else 1  # every rank of a row has all of it
            loss = loss + value * (getattr(self.weights, term) / shared)
        return _Attach.apply(y_BLH, loss, self.share) if loss.requires_grad else y_BLH

    def _here(self, of_tokens: torch.Tensor | None, length: int) -> torch.Tensor | None:
        """[..., L] of whole rows -> of the slice this rank works on."""
        if of_tokens is None or of_tokens.shape[1] == length:
            return of_tokens
        place, pieces = self.piece
        return of_tokens.chunk(pieces, dim=1)[place]

    def _terms(
        self, routing: Any, router: Any, B: int, real: torch.Tensor | None, members: torch.Tensor | None = None
    ) -> dict[str, tuple[torch.Tensor, Any]]:
        """Each term's sum over the rows, and how many those are. members [rows, T]: whose tokens are whose, where rows
        of the data were joined."""
        w, rows = self.weights, 1 if self.whole_batch else B if members is None else members.shape[0]
        out: dict[str, tuple[torch.Tensor, Any]] = {}
        if w.aux or w.z:
            masked = real if self.modal or not self.whole_batch else None
            aux, z = _per_row(routing, router, rows, masked, self.sum_over, members)
            out |= {"aux": (aux.sum(), rows)} if w.aux else {}
            out |= {"z": (z.sum(), rows)} if w.z else {}
        if w.orthogonal and router.weight.requires_grad:
            out["orthogonal"] = (orthogonal(router.weight) * rows, rows)
        if self.modal:
            own = self._rows_with_own(routing.probs.shape[0], rows, real)
            return {
                term: (value * own / rows if term == "orthogonal" else value, own)  # type: ignore[misc]
                for term, (value, _) in out.items()
            }
        return out

    def _rows_with_own(self, tokens: int, rows: int, real: torch.Tensor | None) -> torch.Tensor:
        """How many rows hold a token of this modality, on any rank that has a part of them."""
        if real is None:
            own = self.share.new_full((rows,), float(tokens > 0))
        else:
            own = real.reshape(rows, -1).any(1).float()
        return (self.sum_over(own) > 0).sum()


def _per_row(
    routing: Any,
    router: Any,
    rows: int,
    real: torch.Tensor | None,
    sum_over: Callable[[torch.Tensor], torch.Tensor],
    members: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [rows] = E * sum over experts of (share of choices * mean probability), z [rows] = mean logsumexp^2."""
    E = router.experts
    with torch.no_grad():
        # As if there were neither bias nor full experts: what the router's own probabilities would have chosen.
        ids = routing.probs.topk(router.choices, dim=-1).indices
        chosen = torch.zeros_like(routing.probs).scatter_(1, ids, 1.0)
        tokens = torch.ones_like(routing.probs[:, :1]) if real is None else real.reshape(-1, 1).float()
    z = routing.logits.logsumexp(-1, keepdim=True).square()
    table = torch.cat((routing.probs, z, chosen, torch.ones_like(tokens)), dim=-1) * tokens
    if members is None:
        sums = table.view(rows, table.shape[0] // rows, 2 * E + 2).sum(1)
    else:  # a product, which adds up in one order on any device
        sums = members.to(table.dtype) @ table
    sums = sum_over(sums)
    counted = sums[:, -1].detach().clamp(min=1)
    share_of_choices = sums[:, E + 1 : 2 * E + 1].detach() / counted[:, None]
    aux = E * (share_of_choices * sums[:, :E] / counted[:, None]).sum(-1)
    return aux, sums[:, E] / counted


def orthogonal(weight: torch.Tensor) -> torch.Tensor:
    """Mean square of what the experts' directions share: 0 when all are at right angles."""
    rows = F.normalize(weight.float(), dim=-1)
    gram = rows @ rows.T
    return (gram - torch.eye(len(rows), device=gram.device)).square().mean()
