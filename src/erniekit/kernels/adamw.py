"""One AdamW update of many tensors, and the norm of many gradients, as a few launches. Called by optim/adamw.py.

`reference` is the definition. `FusedAdamW` is for NVIDIA cards: it reads 16-bit or fp32 gradients as they are, writes
fp32 weights, moments and 16-bit weights in one sweep, and the device itself decides whether anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from erniekit.kernels.available import has_triton
from erniekit.kernels.rounding_noise import SALTS, SPREADS

ALIGN = 16  # bytes read at once


class Slot(NamedTuple):
    """One parameter: its gradient and what an update changes."""

    grad: torch.Tensor  # 16-bit or fp32
    master: torch.Tensor  # fp32
    average: torch.Tensor  # fp32 or bf16, as the next
    square: torch.Tensor
    step: torch.Tensor  # fp32 [], updates so far
    weight: torch.Tensor | None = None  # 16-bit, becomes the master's rounded value; None: the master is the weight


class Rates(NamedTuple):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    fair: bool = True  # how bf16 moments are rounded; else to the nearest


def fair16(value: torch.Tensor, step: torch.Tensor, which: int) -> torch.Tensor:
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


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@torch.no_grad()
def reference(
    slots: Sequence[Slot], rates: Rates, scale: torch.Tensor | None = None, good: torch.Tensor | None = None
) -> None:
    """scale: [], what gradients are multiplied by. good: [], 0 where nothing may change."""
    (beta1, beta2), go = rates.betas, good is None or bool(good)
    for grad, master, average, square, step, weight in slots if go else ():
        g = grad.float() if scale is None else grad.float() * scale
        step += 1
        m, v = average.float(), square.float()  # the moments themselves where they are fp32
        master.mul_(1 - rates.lr * rates.weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        taken = float(step)
        root = v.sqrt().div_(math.sqrt(1 - beta2**taken)).add_(rates.eps)
        master.addcdiv_(m, root, value=-rates.lr / (1 - beta1**taken))
        keep_moments((average, square), (m, v), step, rates.fair)
        if weight is not None:
            weight.copy_(master)


def keep_moments(
    kept: tuple[torch.Tensor, torch.Tensor], made: tuple[torch.Tensor, torch.Tensor], step: torch.Tensor, fair: bool
) -> None:
    """made: fp32, what an update made of them. step: counts this update."""
    for which, (old, new) in enumerate(zip(kept, made)):
        if old.dtype != torch.float32:
            old.copy_(fair16(new, step, which) if fair else new)


def norm_reference(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp32 [], whatever the gradients are; zero of none."""
    if not grads:
        return torch.zeros(())
    result: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads), 2, torch.float32)))
    return result


def fits(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether FusedAdamW can work on these: all on NVIDIA cards, and Triton is there."""
    places = {t.device.type for t in tensors}
    return places == {"cuda"} and torch.version.hip is None and has_triton()


class FusedAdamW:
    """Launches over tensors given by address. What it sends to the device (addresses, and which program works on what)
    is kept under a `key` of the caller's, and sent again only when it changed."""

    # Four elements a thread: of more, 16-bit and fp32 values would trade places between threads.
    def __init__(self, block: int = 512, blocks: int = 8, warps: int = 4) -> None:
        self.block, self.blocks, self.warps = block, blocks, warps
        self._sent: dict[Any, tuple[Any, torch.Tensor]] = {}

    @torch.no_grad()
    def update(
        self,
        key: str,
        slots: Sequence[Slot],
        rates: Rates,
        scale: torch.Tensor | None = None,
        good: torch.Tensor | None = None,
    ) -> None:
        """As `reference`; fp32 `scale` and `good` stay on the device."""
        if not slots:
            return
        from erniekit.kernels.triton.adamw import update

        device = slots[0].master.device
        one = self._one(device)
        # One addend for each: a single tensor for all would be read by the host.
        torch._foreach_add_([slot.step for slot in slots], [one if good is None else good] * len(slots))
        (beta1, beta2), lr = rates.betas, rates.lr
        for kind, rows, written in _by_kind(slots):
            fixed, grads, lengths = _addresses(rows), [slot.grad.data_ptr() for slot in rows], _lengths(rows)
            chunks = self._chunks((key, kind), lengths, device)
            if len(chunks):
                update[(len(chunks),)](
                    self._table((key, kind, "tensors"), fixed, device),
                    self._table((key, kind, "grads"), grads, device),
                    chunks,
                    one if scale is None else scale,
                    one if good is None else good,
                    *(float(x) for x in (lr, lr * rates.weight_decay, 1 - beta1, _log(beta1))),
                    *(float(x) for x in (beta2, 1 - beta2, _log(beta2), rates.eps)),
                    *_kinds(kind), FAIR=rates.fair, BLOCK=self.block, BLOCKS=self.blocks, num_warps=self.warps,
                )  # fmt: skip
            for target, made in written:
                target.copy_(made)

    @torch.no_grad()
    def norm(self, key: str, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `norm_reference`: squares are added in fp32 within a chunk and in fp64 over all, in one order always."""
        if not grads:
            return torch.zeros(())
        from erniekit.kernels.triton.adamw import squares

        device, parts = grads[0].device, []
        groups: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        for grad in grads:
            grad = grad.contiguous()
            groups.setdefault((grad.dtype, grad.data_ptr() % ALIGN == 0), []).append(grad)
        for kind, group in groups.items():
            lengths = [grad.numel() for grad in group]
            chunks = self._chunks((key, kind), lengths, device)
            if len(chunks):
                parts.append(torch.empty(len(chunks), dtype=torch.float32, device=device))
                squares[(len(chunks),)](
                    self._table((key, kind, "grads"), [grad.data_ptr() for grad in group], device),
                    self._table((key, kind, "lengths"), lengths, device),
                    chunks, parts[-1], _triton_type(kind[0]), kind[1],
                    BLOCK=self.block, BLOCKS=self.blocks, num_warps=self.warps,
                )  # fmt: skip
        total = torch.cat(parts).sum(dtype=torch.float64) if parts else torch.zeros((), device=device)
        return total.sqrt().float()

    def _one(self, device: torch.device) -> torch.Tensor:
        if device not in self._sent:
            self._sent[device] = (None, torch.ones((), device=device))
        return self._sent[device][1]

    def _table(self, key: Any, values: list[Any], device: torch.device) -> torch.Tensor:
        """int64 on the device; the host does not wait for the copy."""
        sent = self._sent.get(key)
        if sent is None or sent[0] != values:
            sent = self._sent[key] = (values, _send(torch.tensor(values, dtype=torch.int64), device))
        return sent[1]

    def _chunks(self, key: Any, lengths: list[int], device: torch.device) -> torch.Tensor:
        """int32 [programs, 2]: the tensor, and which of its chunks."""
        sent = self._sent.get(key)
        if sent is None or sent[0] != lengths:
            counts = -(-torch.tensor(lengths) // (self.block * self.blocks))
            tensor = torch.repeat_interleave(torch.arange(len(lengths)), counts)
            place = torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor]
            sent = self._sent[key] = (lengths, _send(torch.stack((tensor, place), 1).to(torch.int32), device))
        return sent[1]


# Of the gradients, of the moments, of the weights to be written; whether all lie on ALIGN bytes.
Kind = tuple[torch.dtype, torch.dtype, torch.dtype, bool]


def _by_kind(slots: Sequence[Slot]) -> list[tuple[Kind, list[Slot], list[tuple[torch.Tensor, torch.Tensor]]]]:
    """What one launch can do together, each with (tensor, its copy in one piece) where the tensor is not in one."""
    found: dict[Kind, tuple[list[Slot], list[tuple[torch.Tensor, torch.Tensor]]]] = {}
    for slot in slots:
        whole = slot
        # A model with experts has a thousand of these every step: what is in one piece already is left alone.
        if not all(t is None or t.is_contiguous() for t in slot):
            whole = Slot(*(None if t is None else t.contiguous() for t in slot))  # type: ignore[arg-type]
        grad, master, average, square, _, weight = whole
        places = grad.data_ptr() | master.data_ptr() | average.data_ptr() | square.data_ptr()
        if weight is not None:
            places |= weight.data_ptr()
        written_as = torch.float32 if weight is None else weight.dtype
        kind = (grad.dtype, average.dtype, written_as, places % ALIGN == 0)
        rows, written = found.setdefault(kind, ([], []))
        rows.append(whole)
        if whole is not slot:
            written += [(a, b) for a, b in zip(slot[1:], whole[1:]) if a is not None and b is not None and a is not b]
    return [(kind, *found[kind]) for kind in found]


def _addresses(slots: list[Slot]) -> list[list[int]]:
    return [
        [s.master.data_ptr(), s.average.data_ptr(), s.square.data_ptr(), 0 if s.weight is None else s.weight.data_ptr(),
         s.step.data_ptr(), s.master.numel()]
        for s in slots
    ]  # fmt: skip


def _lengths(slots: list[Slot]) -> list[int]:
    return [slot.master.numel() for slot in slots]


def _kinds(kind: Kind) -> tuple[Any, ...]:
    return *(_triton_type(dtype) for dtype in kind[:3]), kind[3]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
