"""AdamW with fp32 master weights and fp32 gradient accumulation whatever the parameters' dtype. For train/step.py.

The update itself is torch's, or on an NVIDIA card kernels/adamw.py's; this file keeps the fp32 copies, the moments, the
names and the state's way to disk and back. offload.py says where copies and moments live between updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from erniekit.kernels.adamw import FusedAdamW, Rates, Slot, fits, keep_moments, norm_reference
from erniekit.optim.groups import Group
from erniekit.optim.offload import OnDevice

MOMENTS = ("exp_avg", "exp_avg_sq")


class Sum:
    """A 16-bit parameter's gradient: of one micro-batch as autograd made it, of several their sum in fp32."""

    grad: torch.Tensor | None = None


class AdamW:
    def __init__(
        self,
        groups: list[Group],
        betas: tuple[float, float],
        eps: float,
        low_precision: bool = False,
        home: OnDevice | None = None,
        moments: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
    ) -> None:
        """low_precision: the model computes in 16 bit from fp32 parameters, so what is saved has masters as well.
        moments: fp32 or bf16, between updates. stochastic_rounding: of bf16 moments,
        else to the nearest; see kernels/adamw.py."""
        self.groups, self.betas, self.eps = groups, betas, eps
        self.moments, self.stochastic_rounding = moments, stochastic_rounding
        self.low_precision, self.home = low_precision, home or OnDevice()
        self.masters: dict[str, torch.Tensor] = {}  # fp32; the parameter itself when it is fp32 already
        self.params: dict[str, nn.Parameter] = {}
        self._summed: dict[str, Any] = {}  # whose `grad` is a parameter's fp32 gradient
        self._states: dict[str, dict[str, torch.Tensor]] = {}  # "step" and the moments, from a parameter's first update
        for group in groups:
            for name, param in zip(group.names, group.params):
                self.params[name] = param
                if param.dtype == torch.float32:
                    self.masters[name] = self._summed[name] = param
                else:
                    self._add_master(name, param)
        self.fused = FusedAdamW() if fits(_own(param.detach()) for param in self.params.values()) else None
        self._clip: torch.Tensor | None = None  # what the next fused update multiplies gradients by

    def _add_master(self, name: str, param: nn.Parameter) -> None:
        value = _own(param.detach())
        self.masters[name] = self.home.room(value.shape, value.device).copy_(value)
        holder = self._summed[name] = Sum()
        # Of the gradient alone: a hook that knew this object would keep both, and the parameter, alive for good.
        param.register_post_accumulate_grad_hook(lambda ready: _sum(ready, holder))

    @property
    def has_masters(self) -> bool:
        return self.low_precision or any(self.masters[n] is not p for n, p in self.params.items())

    @property
    def bytes_a_weight(self) -> int:
        """What a checkpoint holds of a trained weight beside the weight itself."""
        return 4 * self.has_masters + 2 * self.moments.itemsize

    def gradients(self) -> dict[str, torch.Tensor]:
        """All in fp32: what other ranks' are added to."""
        found = self._gathered()
        for name, grad in found.items():
            if grad.dtype != torch.float32:
                found[name] = self._summed[name].grad = grad.float()
        return found

    def all_gradients(self) -> dict[str, torch.Tensor]:
        """As `gradients`, and zeros where backward came to none: ranks that add theirs up must have one list, whatever
        their rows held."""
        found = self.gradients()
        for name, param in self.params.items():
            if name not in found:
                # Of an fp32 parameter spread as it is itself; of a 16-bit one this rank's own.
                like = param if self._summed[name] is param else _own(param)
                self._summed[name].grad = torch.zeros_like(like.detach(), dtype=torch.float32)
        return self.gradients() if len(found) < len(self.params) else found

    def _gathered(self) -> dict[str, torch.Tensor]:
        """As they are; those of a single micro-batch in 16 bit."""
        for name, param in self.params.items():
            # Zero-bubble pipelines add a weight's gradient by hand, past autograd's hooks.
            if self._summed[name] is not param and param.grad is not None:
                _sum(param, self._summed[name])
        return {n: holder.grad for n, holder in self._summed.items() if holder.grad is not None}

    def gradient_norm(self) -> torch.Tensor:
        if self.fused is not None:
            return self.fused.norm("all", [_own(grad) for grad in self._gathered().values()])
        return norm_reference(list(self.gradients().values()))

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale by limit / max(norm, limit): Paddle's rule, exact at the limit (no epsilon)."""
        if limit <= 0:
            return
        factor = limit / norm.clamp(min=limit)
        if self.fused is not None:
            self._clip = factor  # a sweep over all gradients less
        else:
            torch._foreach_mul_([_own(g) for g in self.gradients().values()], factor)

    def step(self, lr: float, good: torch.Tensor | None = None) -> None:
        """good: where `fused` is there, a number on the device that says by 0 that nothing may change."""
        assert good is None or self.fused is not None
        grads = self.gradients() if self.fused is None else self._gathered()
        for group in self.groups:
            names = [n for n in group.names if n in grads]
            rates = Rates(lr * group.lr_scale, self.betas, self.eps, group.weight_decay, self.stochastic_rounding)
            for part in [[n] for n in names] if self.home.one_by_one else [names]:
                self._update(part, [_own(grads[n]) for n in part], rates, good)
        self._clip = None

    @torch.no_grad()
    def _update(
        self, names: Sequence[str], grads: list[torch.Tensor], rates: Rates, good: torch.Tensor | None = None
    ) -> None:
        """Elementwise, so it does not matter which parameters are updated in one call."""
        states = [self._state(n) for n in names]
        devices = [grad.device for grad in grads]
        masters = [self._fetch_master(n, device) for n, device in zip(names, devices)]
        averages, squares = (
            [self.home.fetch(state[key], device) for state, device in zip(states, devices)] for key in MOMENTS
        )
        weights = [None if self.masters[n] is self.params[n] else _own(self.params[n]) for n in names]
        steps = [state["step"] for state in states]
        if self.fused is not None:
            slots = [Slot(*each) for each in zip(grads, masters, averages, squares, steps, weights)]
            self.fused.update(names[0] if names else "", slots, rates, self._clip, good)
        else:
            m, v = [t.float() for t in averages], [t.float() for t in squares]  # themselves where they are fp32
            adamw(
                masters, grads, m, v, [], steps, fused=True, amsgrad=False, lr=rates.lr,
                beta1=self.betas[0], beta2=self.betas[1], weight_decay=rates.weight_decay, eps=self.eps, maximize=False,
            )  # fmt: skip
            for kept, made, step in zip(zip(averages, squares), zip(m, v), steps):
                keep_moments(kept, made, step, self.stochastic_rounding)
        for name, state, master, weight, *moments in zip(names, states, masters, weights, averages, squares):
            if weight is not None:
                if self.fused is None:
                    weight.copy_(master)
                self.home.store(master, self.masters[name])
            for key, moment in zip(MOMENTS, moments):
                self.home.store(moment, state[key])

    def _fetch_master(self, name: str, device: torch.device) -> torch.Tensor:
        master = self.masters[name]
        return _own(master) if master is self.params[name] else self.home.fetch(master, device)

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._states:
            param = _own(self.params[name].detach())
            moments = {key: self.home.room(param.shape, param.device, self.moments).zero_() for key in MOMENTS}
            self._states[name] = {"step": torch.zeros((), device=param.device), **moments}
        return self._states[name]

    def zero_grad(self) -> None:
        for name, holder in self._summed.items():
            self.params[name].grad = holder.grad = None
        self._clip = None

    def refresh_masters(self) -> None:
        """After the parameters were loaded: the fp32 copies follow them."""
        with torch.no_grad():
            for name, param in self.params.items():
                if self.masters[name] is not param:
                    self.masters[name].copy_(_own(param))

    # --- to disk and back: plain named tensors ---

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the moments."""
        self.home.settle()
        for name in self.params:
            for key in MOMENTS if name in self._states else ():
                yield f"{name}/{key}", self._states[name][key]

    def master_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the fp32 weights behind a model that is saved in 16 bit."""
        self.home.settle()
        for name, param in self.params.items():
            if self.low_precision or self.masters[name] is not param:
                yield name, _own(self.masters[name].detach())

    @torch.no_grad()
    def load(self, steps: int, moments: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> list[str]:
        """Restores in place from this rank's pieces; returns the names that were expected and not given."""
        self.home.settle()
        missing = []
        for name, param in self.params.items():
            master = self.masters[name]
            if name in masters:
                _own(master).copy_(masters[name])
            elif master is not param:
                missing.append(name)
            if steps == 0:
                continue
            state = self._state(name)
            state["step"].fill_(steps)
            for key in MOMENTS:
                if f"{name}/{key}" in moments:
                    state[key].copy_(moments[f"{name}/{key}"])
                else:
                    missing.append(f"{name}/{key}")
        return missing


def _sum(param: torch.Tensor, holder: Sum) -> None:
    """Takes a 16-bit gradient the moment autograd finishes it; the second is the first to need fp32."""
    grad = _own(param.grad)  # type: ignore[arg-type]
    if holder.grad is None:
        holder.grad = grad
    elif holder.grad.dtype == torch.float32:
        holder.grad.add_(grad)
    else:
        holder.grad = holder.grad.float().add_(grad)
    param.grad = None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that fully_shard spread."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
