"""AdamW with fp32 master weights and fp32 gradient accumulation whatever the parameters' dtype. For train/step.py.

The update itself is torch's; this file keeps the fp32 copies, the names and the state's way to disk and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from erniekit.optim.groups import Group

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    def __init__(
        self, groups: list[Group], betas: tuple[float, float], eps: float, low_precision: bool = False
    ) -> None:
        """low_precision: the model computes in 16 bit from fp32 parameters, so what is saved has masters as well."""
        self.groups, self.low_precision = groups, low_precision
        self.masters: dict[str, torch.Tensor] = {}  # fp32; the parameter itself when it is fp32 already
        self.params: dict[str, nn.Parameter] = {}
        for group in groups:
            for name, param in zip(group.names, group.params):
                self.params[name] = param
                if param.dtype == torch.float32:
                    self.masters[name] = param
                else:
                    self.masters[name] = param.detach().float().clone()
                    param.register_post_accumulate_grad_hook(self._adder(name))
        self._inner = torch.optim.AdamW(
            [{"params": [self.masters[n] for n in g.names], "weight_decay": g.weight_decay} for g in groups],
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=True,
        )

    @property
    def has_masters(self) -> bool:
        return self.low_precision or any(self.masters[n] is not p for n, p in self.params.items())

    def _adder(self, name: str):  # type: ignore[no-untyped-def]
        """Moves each low-precision gradient into fp32 the moment autograd finishes it, and frees it."""
        master = self.masters[name]

        def add(param: torch.Tensor) -> None:
            if master.grad is None:
                master.grad = param.grad.float()  # type: ignore[union-attr]
            else:
                master.grad.add_(param.grad)  # type: ignore[arg-type]
            param.grad = None

        return add

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def gradient_norm(self) -> torch.Tensor:
        grads = list(self.gradients().values())
        if not grads:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale by limit / max(norm, limit): Paddle's rule, exact at the limit (no epsilon)."""
        if limit > 0:
            grads = [_own(g) for g in self.gradients().values()]
            torch._foreach_mul_(grads, limit / norm.clamp(min=limit))

    def step(self, lr: float) -> None:
        for group, inner in zip(self.groups, self._inner.param_groups):
            inner["lr"] = lr * group.lr_scale
        self._inner.step()
        with torch.no_grad():
            for name, param in self.params.items():
                if self.masters[name] is not param:
                    param.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def refresh_masters(self) -> None:
        """After the parameters were loaded: the fp32 copies follow them."""
        with torch.no_grad():
            for name, param in self.params.items():
                if self.masters[name] is not param:
                    self.masters[name].copy_(param)

    # --- to disk and back: plain named tensors ---

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the moments."""
        for name, master in self.masters.items():
            state = self._inner.state.get(master, {})
            for key in MOMENTS:
                if key in state:
                    yield f"{name}/{key}", _own(state[key])

    def master_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the fp32 weights behind a model that is saved in 16 bit."""
        for name, param in self.params.items():
            if self.low_precision or self.masters[name] is not param:
                yield name, _own(self.masters[name].detach())

    def steps_taken(self) -> int:
        for state in self._inner.state.values():
            return int(state["step"].item())
        return 0

    @torch.no_grad()
    def load(self, steps: int, moments: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> list[str]:
        """Restores in place from this rank's pieces; returns the names that were expected and not given."""
        missing = []
        for name, param in self.params.items():
            master = self.masters[name]
            if name in masters:
                _own(master).copy_(masters[name])
            elif master is not param:
                missing.append(name)
            if steps == 0:
                continue
            state = {"step": torch.tensor(float(steps), device=master.device)}
            for key in MOMENTS:
                if f"{name}/{key}" in moments:
                    state[key] = torch.zeros_like(master)
                    _own(state[key]).copy_(moments[f"{name}/{key}"])
                else:
                    missing.append(f"{name}/{key}")
            self._inner.state[master] = state
        return missing


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that fully_shard spread."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
