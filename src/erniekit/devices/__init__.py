"""DEVICES: the words of the key `device` -> the file that drives each. Imports no torch: config and launcher read it.

docs/adding-a-device.md says what such a file holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import DeviceError, LaterError

if TYPE_CHECKING:
    from erniekit.devices.base import Device

OTHERS = "ERNIEKIT_DEVICES"  # names devices of other packages; a variable, because every rank inherits it
AUTO = "auto"


@dataclass(frozen=True)
class DeviceEntry:
    """module: has make() -> Device, present() and count(); empty for a word whose device a later version brings."""

    module: str = ""
    visible: str = ""  # the variable that says which of the machine's devices are ours
    files: str = ""  # its device files in /dev, one for each device; counted without asking a driver

    def load(self) -> Any:
        try:
            return import_module(self.module)
        except ModuleNotFoundError as error:
            fix = f"word=module with commas between; check {OTHERS} and PYTHONPATH"
            raise DeviceError(f"no device can be read from {self.module!r}: {error}", where=OTHERS, fix=fix) from error

    def count_visible(self, env: Mapping[str, str]) -> int:
        """Devices of this machine that are ours, without asking the driver: by variable, else by device file."""
        listed = env.get(self.visible) if self.visible else None
        if listed is None:
            return len(list(Path("/dev").glob(self.files))) if self.files else 0
        count = 0
        for word in listed.split(","):
            if not word.strip() or word.strip().startswith("-"):  # CUDA stops reading at the first that is none
                break
            count += 1
        return count


def others(text: str) -> dict[str, DeviceEntry]:
    """`word=module` or `word=module:VARIABLE`, with commas between. Read when config is imported: what is wrong with it
    is said when the device is used."""
    found = {}
    for item in text.split(","):
        word, _, rest = item.strip().partition("=")
        module, _, visible = rest.partition(":")
        if word:
            found[word] = DeviceEntry(module or word, visible)
    return found


# In the order in which `auto` looks for them; the CPU is taken when none is there.
DEVICES: dict[str, DeviceEntry] = {
    **others(os.environ.get(OTHERS, "")),
    "gpu": DeviceEntry("erniekit.devices.cuda", "CUDA_VISIBLE_DEVICES", "nvidia[0-9]*"),
    "cpu": DeviceEntry("erniekit.devices.cpu"),
    "xpu": DeviceEntry(visible="XPU_VISIBLE_DEVICES"),
    "npu": DeviceEntry(visible="ASCEND_RT_VISIBLE_DEVICES"),
    "iluvatar_gpu": DeviceEntry(visible="CUDA_VISIBLE_DEVICES"),
    "metax_gpu": DeviceEntry(visible="CUDA_VISIBLE_DEVICES"),
}


def later() -> tuple[str, ...]:
    return tuple(word for word, entry in DEVICES.items() if not entry.module)


def accelerators() -> Iterator[tuple[str, DeviceEntry]]:
    """What `auto` may take before the CPU, in its order."""
    return ((word, entry) for word, entry in DEVICES.items() if entry.module and word != "cpu")


def entry_of(word: str, env: Mapping[str, str]) -> DeviceEntry:
    """Of a `device` value. Of `auto`: the first that is visible, else the first that has a variable to be chosen by."""
    if word != AUTO:
        return DEVICES[word]
    known = [entry for _, entry in accelerators()]
    visible = (entry for entry in known if entry.count_visible(env))
    return next(visible, next((entry for entry in known if entry.visible), DEVICES["cpu"]))


def pick(word: str = AUTO, no_cuda: bool = False) -> Device:
    """The device for a `device` value. `auto` takes the accelerator that is here, else the CPU."""
    if no_cuda:
        word = "cpu"
    if word == AUTO:
        word = next((name for name, entry in accelerators() if entry.load().present()), "cpu")
    entry = DEVICES[word]
    if not entry.module:
        raise LaterError(f"device {word!r} is not in this version", where="device", fix="use gpu or cpu")
    module = entry.load()
    if not module.present():
        raise DeviceError(
            f"device {word!r} was asked for and torch finds none here",
            where="device",
            fix=getattr(module, "WHEN_ABSENT", "run with device=cpu"),
        )
    made: Device = module.make()
    return made
