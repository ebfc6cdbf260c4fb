"""An accelerator that no file here names, as torch.accelerator finds it: nothing of it is known, all is tried.

Collectives: torch's default backend for its type, if it names one; else several ranks are refused when they meet.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from erniekit.devices import accelerator
from erniekit.devices.accelerator import AcceleratorDevice
from erniekit.devices.base import Device, Finding

EVIDENCE = "whatever torch.accelerator finds; nothing of it is known"
WHEN_ABSENT = "torch.accelerator finds none; import the vendor's plug-in first, or run with device=cpu"
# Types that have a file of their own here; a new vendor's type is another name.
OWN = ("cuda", "npu", "xpu", "mps", "musa", "cpu", "meta")


class GenericDevice(AcceleratorDevice):
    vendor: ClassVar[str] = "generic"

    @property
    def backend(self) -> str:  # type: ignore[override]
        """As torch maps it; read when ranks meet, which imports torch.distributed anyway."""
        from torch.distributed import Backend

        backends: dict[str, Any] = getattr(Backend, "default_device_backend_map", {})
        return f"cpu:gloo,{self.type}:{backends[self.type]}" if self.type in backends else "gloo"


def any_kind() -> str:
    """torch's name of the accelerator that is here, of any vendor; empty where there is none."""
    try:
        # How torch was built does not matter: only what is available counts.
        found = torch.accelerator.current_accelerator(check_available=True)
    except Exception:
        return ""
    return "" if found is None else found.type


def kind() -> str:
    """torch's name of one that no file names; empty where there is none."""
    found = any_kind()
    return found if found not in OWN else ""


def present() -> bool:
    return bool(kind())


def count() -> int:
    return accelerator.count_of(kind()) if kind() else 0


def make() -> Device:
    return accelerator.make(GenericDevice, kind(), f"accelerator {kind()!r}")


def findings() -> list[Finding]:
    return [Finding(True, f"torch calls it {kind()!r}; no file of ours describes it, all that it can do is tried")]
