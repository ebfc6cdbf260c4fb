"""One AdamW update of many tensors, and the norm of many gradients, as a few launches. Called by optim/adamw.py.

`reference` is the definition, `unpacked` and `pack` define how weights and moments are stored between updates.
`FusedAdamW` is for NVIDIA cards: it reads 16-bit or fp32 gradients as they are, writes weights and states in one sweep,
and the device itself decides whether anything is written. lean_adamw.py launches what is stored in fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from erniekit.kernels import exact_master, lean_adamw, moments8
from erniekit.kernels.adamw_slot import Rates, Slot
from erniekit.kernels.available import has_triton
from erniekit.kernels.launch_tables import LaunchTables, log_of, triton_type
from erniekit.kernels.position_noise import TensorPart, draws, high16
from erniekit.kernels.rounding_noise import SALTS, SPREADS
from erniekit.kernels.wide_squares import sum_of_squares

ALIGN = 16  # bytes read at once


def stochastic_bf16(value: torch.Tensor, step: torch.Tensor, which: int) -> torch.Tensor:
    """fp32 -> bf16, up or down by chance, so that the mean is the value. To the nearest, a second moment would never
    fall: 0.999 of a bf16 number is that number again.

    The chance is drawn from the value itself, the update's number and `which` moment it is: the same on every layout of
    the model, and after a resume.
    """
    bits = value.contiguous().view(torch.int32)
    h = bits ^ (step.to(torch.int32) * _signed(SALTS[0]) + _signed(SALTS[1]) * which)
    for shift, factor in SPREADS:
        h = (h ^ ((h >> shift) & ((1 << 32 - shift) - 1))) * _signed(factor)
    noise = (h >> 16) & 0xFFFF
    return ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


@torch.no_grad()
def reference(
    slots: Sequence[Slot],
    rates: Rates,
    scale: torch.Tensor | None = None,
    good: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:
    """scale: [], what gradients are multiplied by. good: [], 0 where nothing may change; count: [], what is added to
    the number of updates all the same, where it is given."""
    (beta1, beta2), go = rates.betas, good is None or bool(good)
    for slot in slots:
        slot.step.add_(float(go) if count is None else count)
    for slot in slots if go else ():
        g = slot.grad.float() if scale is None else slot.grad.float() * scale
        p, m, v = unpacked(slot)
        p.mul_(1 - rates.lr * rates.weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        taken = float(slot.step)
        root = v.sqrt().div_(math.sqrt(1 - beta2**taken)).add_(rates.eps)
        p.addcdiv_(m, root, value=-rates.lr / (1 - beta1**taken))
        pack(slot, p, m, v, rates.stochastic)


def unpacked(slot: Slot) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight and moments in fp32; what is stored in fp32 itself, not a copy."""
    if slot.master is not None:
        p = slot.master
    else:
        assert slot.weight is not None
        exact = slot.remainder is not None
        p = exact_master.join(slot.weight, slot.remainder) if exact else slot.weight.float()  # type: ignore[arg-type]
    if slot.scales is None:
        return p, slot.average.float(), slot.square.float()
    return p, *moments8.decode(slot.average, slot.square, slot.scales, _place(slot).block)


def pack(slot: Slot, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, stochastic: bool) -> None:
    """What an update made of them, stored. slot.step counts this update. stochastic: see Rates."""
    if slot.scales is None:
        keep_moments((slot.average, slot.square), (m, v), slot.step, stochastic)
    else:
        *codes, scales = moments8.encode(m, v, _draws(slot, p, 1), _place(slot).block)
        for old, new in zip((slot.average, slot.square, *slot.scales), (*codes, *scales)):
            old.copy_(new)
    if slot.weight is None:
        return
    if slot.master is not None:
        slot.weight.copy_(slot.master)
    elif slot.remainder is not None:
        for old, new in zip((slot.weight, slot.remainder), exact_master.split(p)):
            old.copy_(new)
    else:
        slot.weight.copy_(stochastic_bf16_at(p, _draws(slot, p, 0)))


def _draws(slot: Slot, like: torch.Tensor, which: int) -> torch.Tensor:
    rows, columns = like.shape if like.dim() == 2 else (like.numel(), 1)
    return draws(_place(slot), slot.step, rows, columns, which).view(like.shape)


def _place(slot: Slot) -> TensorPart:
    assert slot.place is not None
    return slot.place


def stochastic_bf16_at(value: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, up or down by the draw's high half, so that the mean is the value."""
    bits = value.contiguous().view(torch.int32)
    bits = torch.where(value.isnan(), exact_master.QUIET_NAN, bits + high16(drawn))
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def keep_moments(
    kept: tuple[torch.Tensor, torch.Tensor],
    made: tuple[torch.Tensor, torch.Tensor],
    step: torch.Tensor,
    stochastic: bool,
) -> None:
    """made: fp32, what an update made of them. step: counts this update."""
    for which, (old, new) in enumerate(zip(kept, made)):
        if old.dtype != torch.float32:
            old.copy_(stochastic_bf16(new, step, which) if stochastic else new)


def norm_reference(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 [], whatever the gradients are; zero of none."""
    if not grads:
        return torch.zeros(())
    if grads[0].device.type == "cpu":
        return sum_of_squares(grads, "cpu").sqrt().float()
    result: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads), 2, torch.float32)))
    return result


class UpdateCheck(NamedTuple):
    """What decides one tensor's update, fp32 [] each."""

    norm: torch.Tensor  # of its gradient
    scale: torch.Tensor  # what the gradient is multiplied by: limit / max(limit, the norm it is clipped by)
    good: torch.Tensor  # 1: the update is made; 0: the loss or the gradient is not a number


def check_reference(norm: torch.Tensor, last: torch.Tensor | None, sound: torch.Tensor, limit: float) -> UpdateCheck:
    """last: the norm to clip by, this one's own where it is not finite or not there."""
    by = norm if last is None else torch.where(last.isfinite(), last, norm)
    return UpdateCheck(norm, limit / by.clamp(min=limit), sound * norm.isfinite())


def fits(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether FusedAdamW can work on these: all on NVIDIA cards, and Triton is there."""
    places = {t.device.type for t in tensors}
    return places == {"cuda"} and torch.version.hip is None and has_triton()


class FusedAdamW:
    """Launches over tensors given by address, which are kept on the device under a `key` of the caller's."""

    # Four elements a thread: of more, 16-bit and fp32 values would trade places between threads.
    def __init__(self, block: int = 512, blocks: int = 8, warps: int = 4) -> None:
        self.block, self.blocks, self.warps = block, blocks, warps
        self.tables = LaunchTables()

    @torch.no_grad()
    def update(
        self,
        key: str,
        slots: Sequence[Slot],
        rates: Rates,
        scale: torch.Tensor | None = None,
        good: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
    ) -> None:
        """As `reference`; fp32 `scale`, `good` and `count` stay on the device."""
        if not slots:
            return
        from erniekit.kernels.triton.adamw import update

        device = slots[0].grad.device
        one = self.tables.one(device)
        counted = good if count is None else count
        # One addend for each: a single tensor for all would be read by the host.
        torch._foreach_add_([slot.step for slot in slots], [one if counted is None else counted] * len(slots))
        (beta1, beta2), lr = rates.betas, rates.lr
        lean_adamw.update(self.tables, key, [slot for slot in slots if slot.lean], rates, scale, good)
        for kind, rows, written in _by_kind([slot for slot in slots if not slot.lean]):
            fixed, grads, lengths = _addresses(rows), [slot.grad.data_ptr() for slot in rows], _lengths(rows)
            chunks = self.tables.chunks((key, kind), lengths, self.block * self.blocks, device)
            if len(chunks):
                update[(len(chunks),)](
                    self.tables.table((key, kind, "tensors"), fixed, device),
                    self.tables.table((key, kind, "grads"), grads, device),
                    chunks,
                    one if scale is None else scale,
                    one if good is None else good,
                    *(float(x) for x in (lr, lr * rates.weight_decay, 1 - beta1, log_of(beta1))),
                    *(float(x) for x in (beta2, 1 - beta2, log_of(beta2), rates.eps)),
                    *_kinds(kind), STOCHASTIC=rates.stochastic,
                    BLOCK=self.block, BLOCKS=self.blocks, num_warps=self.warps,
                )  # fmt: skip
            for target, made in written:
                target.copy_(made)

    @torch.no_grad()
    def norm(self, key: str, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `norm_reference`: squares are added in fp32 within a chunk and in fp64 over all, in one order always."""
        if not grads:
            return torch.zeros(())
        parts = self._squares(key, grads)
        total = torch.cat(parts).sum(dtype=torch.float64) if parts else torch.zeros((), device=grads[0].device)
        return total.sqrt().float()

    @torch.no_grad()
    def check(
        self, key: str, grad: torch.Tensor, last: torch.Tensor | None, sound: torch.Tensor, limit: float
    ) -> UpdateCheck:
        """As `check_reference`, with the norm of `grad`."""
        parts = self._squares(key, [grad])
        if not parts:
            return check_reference(torch.zeros((), device=grad.device), last, sound, limit)
        from erniekit.kernels.triton.adamw import check_update

        out = torch.empty(3, dtype=torch.float32, device=grad.device)
        before = sound if last is None else last
        count = len(parts[0])
        block = min(8192, max(32, 1 << (count - 1).bit_length()))  # at once: the program waits for each block
        check_update[(1,)](
            parts[0], before, sound, float(limit), out, count, last is None, BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return UpdateCheck(*out.unbind())

    def _squares(self, key: str, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of gradients of each kind: the sums of squares, fp32, a chunk each."""
        from erniekit.kernels.triton.adamw import squares

        device, parts = grads[0].device, []
        groups: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        for grad in grads:
            grad = grad.contiguous()
            groups.setdefault((grad.dtype, grad.data_ptr() % ALIGN == 0), []).append(grad)
        for kind, group in groups.items():
            lengths = [grad.numel() for grad in group]
            chunks = self.tables.chunks((key, kind), lengths, self.block * self.blocks, device)
            if len(chunks):
                parts.append(torch.empty(len(chunks), dtype=torch.float32, device=device))
                squares[(len(chunks),)](
                    self.tables.table((key, kind, "grads"), [grad.data_ptr() for grad in group], device),
                    self.tables.table((key, kind, "lengths"), lengths, device),
                    chunks, parts[-1], triton_type(kind[0]), kind[1],
                    BLOCK=self.block, BLOCKS=self.blocks, num_warps=self.warps,
                )  # fmt: skip
        return parts


# Of the gradients, of the moments, of the weights to be written; whether all lie on ALIGN bytes.
Kind = tuple[torch.dtype, torch.dtype, torch.dtype, bool]


def _by_kind(slots: Sequence[Slot]) -> list[tuple[Kind, list[Slot], list[tuple[torch.Tensor, torch.Tensor]]]]:
    """What one launch can do together, each with (tensor, its copy in one piece) where the tensor is not in one."""
    found: dict[Kind, tuple[list[Slot], list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for slot in slots:
        whole = slot
        # A model with experts has a thousand of these every step: what is in one piece already is not copied.
        if not all(t is None or t.is_contiguous() for t in slot[:6]):
            whole = Slot(*(None if t is None else t.contiguous() for t in slot[:6]))  # type: ignore[arg-type]
        grad, master, average, square, _, weight = whole[:6]
        assert master is not None
        places = grad.data_ptr() | master.data_ptr() | average.data_ptr() | square.data_ptr()
        if weight is not None:
            places |= weight.data_ptr()
        written_as = torch.float32 if weight is None else weight.dtype
        kind = (grad.dtype, average.dtype, written_as, places % ALIGN == 0)
        rows, written = found.setdefault(kind, ([], []))
        rows.append(whole)
        if whole is not slot:
            written += [(a, b) for a, b in zip(slot[1:6], whole[1:6]) if a is not None and b is not None and a is not b]
    return [(kind, *found[kind]) for kind in found]


def _addresses(slots: list[Slot]) -> list[list[int]]:
    return [
        [_master(s).data_ptr(), s.average.data_ptr(), s.square.data_ptr(),
         0 if s.weight is None else s.weight.data_ptr(), s.step.data_ptr(), _master(s).numel()]
        for s in slots
    ]  # fmt: skip


def _lengths(slots: list[Slot]) -> list[int]:
    return [_master(slot).numel() for slot in slots]


def _kinds(kind: Kind) -> tuple[Any, ...]:
    return *(triton_type(dtype) for dtype in kind[:3]), kind[3]


def _master(slot: Slot) -> torch.Tensor:
    assert slot.master is not None
    return slot.master
