"""Capabilities found by trying them: each probe runs one small operation on the device and compares the result.

`probed` is called by pick(). What a device's file claims is tried unless the file names it in `proven`; what it lists
in `lacks` is not tried. A probe that raises, or computes something else, becomes one line with its reason, never a
traceback. ERNIEKIT_WITHOUT=triton,graphs skips these: the way out where a vendor's library ends the process instead of
raising.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from erniekit import capabilities
from erniekit.devices.base import CLAIMED_BY, Device
from erniekit.devices.promises import bind_early
from erniekit.log import emit
from erniekit.printable import error_line

WITHOUT = "ERNIEKIT_WITHOUT"
ROWS, WIDTH = 32, 64  # of the products that are tried: tiles of every card's kernels fit
LONGEST_REASON = 120
UNCLAIMED = "its device file does not claim it"

_known: dict[tuple[str, str], Mapping[str, str]] = {}  # what was found in this process, by vendor and name


def probed(device: Device, count: int = 1) -> Device:
    """The device without what it lacks; once a process, as one process has one accelerator. count: of its kind here."""
    key = (device.vendor, device.name)
    if key not in _known:
        _known[key] = find_lacks(device, count)
        for name, reason in _known[key].items():
            if name not in device.quiet_lacks and reason != UNCLAIMED:
                emit(f"device   {device.name}: {capabilities.line(name, reason)}")
    if device.vendor != "cpu":
        capabilities.set_lacks(_known[key])
    return device.without(_known[key])


def find_lacks(device: Device, count: int = 1) -> dict[str, str]:
    """capability -> why it is not there. On a device of which nothing is unproven this runs nothing."""
    unknown = set(left_out := skipped()) - set(capabilities.CAPABILITIES)
    if unknown:
        raise _unknown(sorted(unknown))
    if device.vendor == "cpu":
        return {}
    # A device that does not claim fast bf16 may have a slow one, which users may choose.
    unclaimed = dict.fromkeys(set(CLAIMED_BY) - {"bf16", *device.claims}, UNCLAIMED)
    lacks = {**unclaimed, **device.lacks, **dict.fromkeys(left_out, f"left out by {WITHOUT}")}
    todo = [name for name in device.claims if name not in lacks and name not in device.proven]
    if todo:
        bind_early(device, count)
    for name in todo:
        if (problem := try_one(name, device)) is not None:
            lacks[name] = problem
    return {name: lacks[name] for name in capabilities.CAPABILITIES if name in lacks}


def try_one(name: str, device: Device) -> str | None:
    """Why a capability does not work; None: it does. Whatever a vendor's library raises is a reason."""
    try:
        right = PROBES[name](device)
        device.synchronise()
    except Exception as error:
        return error_line(error, LONGEST_REASON)
    return None if right else "its result is wrong"


def skipped() -> list[str]:
    return [name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()]


def _unknown(names: list[str]) -> Exception:
    from erniekit.errors import DeviceError

    choices = ", ".join(capabilities.CAPABILITIES)
    return DeviceError(f"no capability is called {', '.join(names)}", where=WITHOUT, fix=f"one or more of {choices}")


# --- one function a capability: True where the result is right


def _whole(device: Device, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, the same everywhere: products of them are exact in every format."""
    numbers = torch.arange(rows * columns, dtype=torch.float32).remainder(3).view(rows, columns) - 1
    return numbers.to(device.handle, dtype)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.float().cpu(), expected.float().cpu())


def _bf16(device: Device) -> bool:
    a, b = (_whole(device, ROWS, ROWS, torch.bfloat16) for _ in range(2))
    a.requires_grad_()
    out = a @ b
    out.sum().backward()
    assert a.grad is not None
    exact = _whole(device, ROWS, ROWS, torch.float32).cpu()
    return _same(out.detach(), exact @ exact) and _same(a.grad, exact.sum(1).expand(ROWS, ROWS))


def _triton(device: Device) -> bool:
    from erniekit.devices.triton_probe import add_one

    x = torch.arange(WIDTH, dtype=torch.float32).to(device.handle)
    out = torch.zeros_like(x)
    add_one[(1,)](x, out, WIDTH, BLOCK=128)
    return _same(out, torch.arange(WIDTH, dtype=torch.float32) + 1)


def _grouped(device: Device) -> bool:
    rows, weight = (_whole(device, n, WIDTH, torch.bfloat16) for n in (ROWS, 2 * WIDTH))
    weight, ends = weight.view(2, WIDTH, WIDTH), torch.tensor([8, ROWS], dtype=torch.int32).to(device.handle)
    found = F.grouped_mm(rows, weight, offs=ends).cpu().float()
    wide, each = rows.cpu().float(), weight.cpu().float()
    return _same(found, torch.cat([wide[:8] @ each[0], wide[8:] @ each[1]]))


def _varlen(device: Device) -> bool:
    """By the operator that varlen_attn calls: around that torch imports its compiler, seconds of a run's start."""
    if find_spec("torch.nn.attention.varlen") is None:
        raise ImportError("this torch has no varlen_attn")
    q = _whole(device, ROWS, WIDTH, torch.bfloat16).view(ROWS, 1, WIDTH)
    bounds = torch.tensor([0, 8, ROWS], dtype=torch.int32).to(device.handle)
    given = (q, q, q, bounds, bounds, ROWS - 8, ROWS - 8)
    try:
        out = torch.ops.aten._flash_attention_forward(*given, 0.0, True, False)[0]
    except Exception:  # a vendor's torch may have one of its own there
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(*given, window_size=(-1, 0))
    return _same(out[:1], q[:1]) and _same(out[8:9], q[8:9])  # the first token of a document sees only itself


def _wide(device: Device) -> bool:
    a = _whole(device, ROWS, ROWS, torch.bfloat16)
    exact = a.float().cpu() @ a.float().cpu()
    out = torch.mm(a, a, out_dtype=torch.float32)
    torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    return out.dtype == torch.float32 and _same(out, 2 * exact)


def _fp8(device: Device) -> bool:
    a = _whole(device, ROWS, ROWS, torch.float32)
    low, one = a.to(torch.float8_e4m3fn), torch.ones((), device=device.handle)
    out = torch._scaled_mm(low, low.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return _same(out, a.cpu() @ a.cpu().t())


def _graphs(device: Device) -> bool:
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False).to(device.handle)
    x = _whole(device, ROWS, WIDTH, torch.float32).requires_grad_()
    expected = layer(x).detach()
    replayed = device.graphed(layer, (x.detach().clone().requires_grad_(),))(x)
    return torch.allclose(replayed.detach(), expected, atol=1e-4)


def _nvidia(device: Device) -> bool:
    return device.capability() is not None


PROBES: dict[str, Callable[[Device], bool]] = {
    "bf16": _bf16,
    "triton": _triton,
    "grouped": _grouped,
    "varlen": _varlen,
    "wide": _wide,
    "fp8": _fp8,
    "graphs": _graphs,
    "nvidia": _nvidia,
}
assert PROBES.keys() == capabilities.CAPABILITIES.keys()
