"""AdamW with fp32 master weights and fp32 gradient accumulation whatever the parameters' dtype. For train/step.py.

The update itself is torch's, or on an NVIDIA card kernels/adamw.py's; this file keeps masters, moments, names and the
state's way to disk and back. storage.py has the form they are stored in, offload.py where they are between updates,
in_backward.py updates while gradients are still being computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from erniekit.kernels import exact_master, moments8
from erniekit.kernels.adamw import FusedAdamW, UpdateCheck, check_reference, fits, norm_reference, pack, unpacked
from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.kernels.position_noise import TensorPart
from erniekit.optim.groups import Group
from erniekit.optim.loading import load_moments
from erniekit.optim.offload import OnDevice
from erniekit.optim.storage import MOMENTS, SCALES, Storage, stored_name

REMAINDER = "remainder"  # of an exact16 master, as checkpoints call it


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
        storage: Storage | None = None,
    ) -> None:
        """low_precision: the model computes in 16 bit from fp32 parameters, so what is saved has masters as well."""
        self.groups, self.betas, self.eps = groups, betas, eps
        self.storage = storage or Storage()
        self.low_precision, self.home = low_precision, home or OnDevice()
        self.masters: dict[str, torch.Tensor] = {}  # fp32; the parameter itself when it is fp32 already
        self.remainders: dict[str, torch.Tensor] = {}  # int16, of exact16 masters
        self.params: dict[str, nn.Parameter] = {}
        self.places: dict[str, TensorPart] = {}
        self.group_of: dict[str, Group] = {}
        self._summed: dict[str, Any] = {}  # whose `grad` is a parameter's fp32 gradient
        self._states: dict[str, dict[str, torch.Tensor]] = {}  # "step" and the moments, from a parameter's first update
        for group in groups:
            for name, param in zip(group.names, group.params):
                self.params[name], self.group_of[name] = param, group
                self.places[name] = self.storage.place(name, own_memory(param.detach()))
                if param.dtype == torch.float32:
                    self.masters[name] = self._summed[name] = param
                else:
                    self._add_master(name, param)
        self.fused = FusedAdamW() if fits(own_memory(param.detach()) for param in self.params.values()) else None
        self._clip: torch.Tensor | None = None  # what the next fused update multiplies gradients by
        self.last_norm: torch.Tensor | None = None  # of the last sound step's gradients, where in_backward.py updates

    def _add_master(self, name: str, param: nn.Parameter) -> None:
        value = own_memory(param.detach())
        kind = self.storage.master_of(value)
        if kind == "fp32":
            self.masters[name] = self.home.room(value.shape, value.device).copy_(value)
        elif kind == "exact16":
            self.remainders[name] = self.home.room(value.shape, value.device, torch.int16).zero_()
        holder = self._summed[name] = Sum()
        # Holds the sum only: a hook with a reference to this object would keep both, and the parameter, alive for good.
        param.register_post_accumulate_grad_hook(lambda ready: _sum(ready, holder))

    @property
    def has_masters(self) -> bool:
        return self.low_precision or any(self.masters.get(n) is not p for n, p in self.params.items())

    @property
    def bytes_a_weight(self) -> float:
        """What a checkpoint holds of a trained weight besides the weight itself."""
        count = sum(own_memory(p.detach()).numel() for p in self.params.values())
        held = 0.0
        for name, param in self.params.items():
            value = own_memory(param.detach())
            kind = self.storage.master_of(value)
            each = {"own": 4 * self.low_precision, "fp32": 4, "exact16": 2, "none": 0}[kind]
            kinds = self._kinds(name).values()
            held += each * value.numel() + sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds)
        return held / max(1, count)

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
                like = param if self._summed[name] is param else own_memory(param)
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
            return self.fused.norm("all", [own_memory(grad) for grad in self._gathered().values()])
        return norm_reference(list(self.gradients().values()))

    def clip(self, norm: torch.Tensor, limit: float) -> None:
        """Scale by limit / max(norm, limit): Paddle's rule, exact at the limit (no epsilon)."""
        if limit <= 0:
            return
        factor = limit / norm.clamp(min=limit)
        if self.fused is not None:
            self._clip = factor  # a sweep over all gradients less
        else:
            torch._foreach_mul_([own_memory(g) for g in self.gradients().values()], factor)

    def step(self, lr: float, good: torch.Tensor | None = None) -> None:
        """good: where `fused` is there, a number on the device; 0: nothing may change."""
        assert good is None or self.fused is not None
        grads = self.gradients() if self.fused is None else self._gathered()
        for group in self.groups:
            names = [n for n in group.names if n in grads]
            rates = self._rates(group, lr)
            if not self._one_by_one:
                self._update(names, [own_memory(grads[n]) for n in names], rates, self._clip, good)
                continue
            for k, name in enumerate(names):
                after = names[k + 1 : k + 1 + self.home.ahead]
                self._update([name], [own_memory(grads[name])], rates, self._clip, good, after=after)
        self._clip = None

    @property
    def _one_by_one(self) -> bool:
        """Elementwise, so it does not matter for the result what is updated in one call: one by one where states come
        from elsewhere, or where torch's update needs them unpacked."""
        unpacks = self.fused is None and (self.storage.moments == "8bit" or self.storage.masters != "fp32")
        return self.home.one_by_one or unpacks

    def _rates(self, group: Group, lr: float) -> Rates:
        return Rates(lr * group.lr_scale, self.betas, self.eps, group.weight_decay, self.storage.stochastic)

    def update_one(
        self,
        name: str,
        lr: float,
        scale: torch.Tensor | None,
        good: torch.Tensor,
        count: torch.Tensor,
        after: Sequence[str] = (),
    ) -> None:
        """One parameter from its gradient, which is freed. good: 0 leaves it as it is. count: what is added to its
        number of updates even so. after: the parameters that are next."""
        grad = own_memory(self._summed[name].grad)
        self._update([name], [grad], self._rates(self.group_of[name], lr), scale, good, count, after)
        self.drop_gradient(name)

    def gradient_of(self, name: str) -> torch.Tensor | None:
        grad = self._summed[name].grad
        return None if grad is None else own_memory(grad)

    def keep_gradient(self, name: str, grad: torch.Tensor) -> None:
        """In the place of a parameter's own: the sum over ranks, fp32."""
        self._summed[name].grad = grad

    def drop_gradient(self, name: str) -> None:
        self.params[name].grad = self._summed[name].grad = None

    def norm_of(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        return norm_reference([grad]) if self.fused is None else self.fused.norm(name, [grad])

    def check(
        self, name: str, grad: torch.Tensor, last: torch.Tensor | None, sound: torch.Tensor, limit: float
    ) -> UpdateCheck:
        """What decides a parameter's update from its gradient, where it is clipped by the norm `last`, or its own."""
        if self.fused is not None:
            return self.fused.check(name, grad, last, sound, limit)
        return check_reference(norm_reference([grad]), last, sound, limit)

    @torch.no_grad()
    def _update(
        self,
        names: Sequence[str],
        grads: list[torch.Tensor],
        rates: Rates,
        scale: torch.Tensor | None = None,
        good: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        after: Sequence[str] = (),
    ) -> None:
        slots, moved = [], []
        for name, grad in zip(names, grads):
            fetched = {k: (kept, self.home.fetch(kept, grad.device)) for k, kept in self._stored(name).items()}
            slots.append(self._slot(name, grad, {key: here for key, (_, here) in fetched.items()}))
            moved += [(here, kept) for kept, here in fetched.values()]
        self.expect(after)
        if self.fused is not None:
            self.fused.update(names[0] if names else "", slots, rates, scale, good, count)
        else:
            self._update_by_torch(slots, rates, scale, good, count)
        for here, kept in moved:
            self.home.store(here, kept)

    def _update_by_torch(
        self,
        slots: list[Slot],
        rates: Rates,
        scale: torch.Tensor | None,
        good: torch.Tensor | None,
        count: torch.Tensor | None,
    ) -> None:
        steps = [slot.step for slot in slots]
        if good is not None and not bool(good):
            for step in steps if count is not None else ():
                step.add_(count)  # type: ignore[arg-type]
            return
        parts = [unpacked(slot) for slot in slots]
        p, m, v = ([part[k] for part in parts] for k in range(3))
        grads = [slot.grad.float() if scale is None else slot.grad.float() * scale for slot in slots]
        adamw(
            p, grads, m, v, [], steps, fused=True, amsgrad=False, lr=rates.lr,
            beta1=self.betas[0], beta2=self.betas[1], weight_decay=rates.weight_decay, eps=self.eps, maximize=False,
        )  # fmt: skip
        for slot, made in zip(slots, parts):
            pack(slot, *made, rates.stochastic)

    def expect(self, names: Iterable[str]) -> None:
        """These parameters are updated next."""
        for name in names:
            self.home.expect(self._stored(name).values())

    def _stored(self, name: str) -> dict[str, torch.Tensor]:
        """What an update reads and writes of a parameter besides the parameter itself, where it is kept."""
        state = {key: tensor for key, tensor in self._state(name).items() if key != "step"}
        if name in self.remainders:
            state[REMAINDER] = self.remainders[name]
        elif name in self.masters and self.masters[name] is not self.params[name]:
            state["master"] = self.masters[name]
        return state

    def _slot(self, name: str, grad: torch.Tensor, here: Mapping[str, torch.Tensor]) -> Slot:
        value, place = own_memory(self.params[name].detach()), self.places[name]
        own, blocks = value.dtype == torch.float32, self.storage.blocks(place)
        by_place = blocks or not (own or "master" in here or REMAINDER in here)
        average, square = (here[key] for key in MOMENTS)
        return Slot(
            grad, value if own else here.get("master"), average, square, self._states[name]["step"],
            None if own else value, here.get(REMAINDER),
            moments8.Scales(*(here[key] for key in SCALES)) if blocks else None,
            place if by_place else None,
        )  # fmt: skip

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._states:
            param = own_memory(self.params[name].detach())
            kinds = self._kinds(name)
            made = {k: self.home.room(shape, param.device, dtype).zero_() for k, (shape, dtype) in kinds.items()}
            self._states[name] = {"step": torch.zeros((), device=param.device), **made}
        return self._states[name]

    def _kinds(self, name: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> shape and dtype of what an update keeps of a parameter besides its master."""
        return self.storage.state_kinds(tuple(own_memory(self.params[name].detach()).shape), self.places[name])

    def zero_grad(self) -> None:
        for name, holder in self._summed.items():
            self.params[name].grad = holder.grad = None
        self._clip = None

    def refresh_masters(self) -> None:
        """After the parameters were loaded: the fp32 copies follow them."""
        self.home.settle()
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.params[name]:
                    master.copy_(own_memory(self.params[name]))
            for remainder in self.remainders.values():
                remainder.zero_()

    # --- to disk and back: plain named tensors, and the last norm ---

    def numbers(self) -> dict[str, float]:
        last = float(self.last_norm) if self.last_norm is not None else torch.nan
        return {"last_norm": last} if last == last else {}

    def load_numbers(self, numbers: Mapping[str, float]) -> None:
        device = next((p.device for p in self.params.values()), torch.device("cpu"))
        last = numbers.get("last_norm")
        self.last_norm = None if last is None else torch.tensor(float(last), device=device)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the moments."""
        self.home.settle()
        for name in self.params:
            for key, tensor in self._states.get(name, {}).items():
                if key != "step":
                    yield stored_name(name, key, self.places[name].block), tensor

    def master_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's pieces of the fp32 weights behind a model that is saved in 16 bit: whole, or what the 16-bit
        weight lacks of them."""
        self.home.settle()
        for name, param in self.params.items():
            if name in self.remainders:
                yield f"{name}/{REMAINDER}", self.remainders[name]
            elif name in self.masters and (self.low_precision or self.masters[name] is not param):
                yield name, own_memory(self.masters[name].detach())

    @torch.no_grad()
    def load(self, steps: int, moments: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> list[str]:
        """Restores in place from this rank's pieces; returns the names that were expected and not given. The parameters
        have the checkpoint's weights already. Also from a checkpoint that stored masters or moments in another form."""
        self.home.settle()
        missing = []
        for name, param in self.params.items():
            if not self._load_master(name, own_memory(param), masters):
                missing.append(name)
            if steps:
                self._state(name)["step"].fill_(steps)
                if lacking := self._load_state(name, moments):
                    missing.append(lacking)
        return missing

    def _load_state(self, name: str, stored: Mapping[str, torch.Tensor]) -> str:
        """What the checkpoint lacks of it; empty: nothing."""
        found = load_moments(name, self._state(name), self.places[name], stored)
        return "" if found else f"{name}/{MOMENTS[0]}"

    def _load_master(self, name: str, value: torch.Tensor, masters: Mapping[str, torch.Tensor]) -> bool:
        """False: there is none, and this parameter needs one."""
        kind, rest = self.storage.master_of(value), f"{name}/{REMAINDER}"
        if rest in masters:
            if name in self.remainders:
                self.remainders[name].copy_(masters[rest])
            elif kind != "none":
                whole = exact_master.join(value.to(torch.bfloat16).cpu(), masters[rest].cpu())
                own_memory(self.masters[name]).copy_(whole)
        elif name in masters:
            if name in self.remainders:
                weight, remainder = exact_master.split(masters[name])
                value.copy_(weight)
                self.remainders[name].copy_(remainder)
            elif kind != "none":
                own_memory(self.masters[name]).copy_(masters[name])
        else:
            return kind in ("own", "none")
        return True


def _sum(param: torch.Tensor, holder: Sum) -> None:
    """Takes a 16-bit gradient the moment autograd finishes it; the second is the first to need fp32."""
    grad = own_memory(param.grad)  # type: ignore[arg-type]
    if holder.grad is None:
        holder.grad = grad
    elif holder.grad.dtype == torch.float32:
        holder.grad.add_(grad)
    else:
        holder.grad = holder.grad.float().add_(grad)
    param.grad = None


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor that fully_shard spread."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
