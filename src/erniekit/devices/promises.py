"""What a device's class must have for what it says, looked at when the device is made: before a run reaches the work
that would end without it. docs/adding-a-device.md has the same table. Used by devices/entry.py and devices/probes.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral

import torch

from erniekit.devices.base import Device

PAGE = "docs/adding-a-device.md"
# Class attribute that is True -> methods of the base class that are not real until a kind has its own.
NEEDS = {
    "asynchronous": ("synchronise", "event", "stream", "current_stream", "on_stream", "record_stream"),
    "counts_memory": ("allocated", "reserved", "peak_allocated", "peak_reserved", "reset_peak"),
    "records_graphs": ("graphed", "graph_memory", "recorded", "free_memory"),
}
_FIELDS: dict[str, tuple[type, str]] = {
    "name": (str, "a text"),
    "type": (str, "torch's word, a text"),
    "total_memory": (Integral, "a whole number of bytes, 0 where it is not known"),
    "peak_flops": (Mapping, "dtype -> FLOP/s, {} where it is not known"),
}


def broken_promise(made: object) -> tuple[str, str]:
    """What is wrong with what a make() gave, and what to do; both empty where nothing is."""
    if not isinstance(made, Device):
        gave = f"the class {made.__name__}" if isinstance(made, type) else f"{type(made).__name__}"
        return f"its make() gave {gave}, no erniekit.devices.base.Device", f"{PAGE} says what make() gives"
    kind = type(made).__name__
    for field, (wanted, words) in _FIELDS.items():
        value = getattr(made, field, None)
        if not isinstance(value, wanted):
            return f"the field {field} of {kind} is {value!r}", f"{field} is {words} ({PAGE})"
    try:
        torch.device(made.handle)
    except Exception:
        what = f"torch {torch.__version__} knows no device type {made.type!r}, which {kind} names"
        return what, f"import what brings {made.type!r} to torch in present() and make()"
    for attribute, methods in NEEDS.items():
        missing = [f"{name}()" for name in methods if not _own(type(made), name)]
        if getattr(made, attribute) and missing:
            fix = f"write what is missing, or leave {attribute} False: row `{attribute}` of {PAGE}"
            return f"{kind} says {attribute} and has no {', no '.join(missing)}", fix
    return "", ""


def _own(kind: type[Device], method: str) -> bool:
    return getattr(kind, method) is not getattr(Device, method)


def bind_early(device: Device, count: int) -> None:
    """Before the first work of a rank: or every rank would open the machine's first card. There are more ranks than
    cards where they share. count: of its kind here."""
    if "LOCAL_RANK" in os.environ:
        device.bind(int(os.environ["LOCAL_RANK"]) % max(1, count))


def first_tensor(device: Device, count: int) -> None:
    """Raises what torch raises where a type is only a word to it."""
    bind_early(device, count)
    torch.empty(1, device=device.handle)
