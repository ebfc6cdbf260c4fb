"""DEVICES: the values of the key `device` -> the file that drives each. Imports no torch: config and launcher read it.

A value names a vendor, not torch's device type: five vendors' builds of torch call their cards cuda. FAMILIES are names
that several vendors share. A package adds a name by an entry point of the group `erniekit.devices`.
docs/adding-a-device.md describes a device's file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from erniekit.devices.entry import OTHERS, OURS, DeviceEntry, check_others, others
from erniekit.errors import DeviceError
from erniekit.printable import counted
from erniekit.registry import Registry

if TYPE_CHECKING:
    from erniekit.devices.base import Device

__all__ = ["DEVICES", "FAMILIES", "INSTALLED", "OTHERS", "DeviceEntry", "others", "pick"]
AUTO = "auto"
# Variables that name the device of `auto`: ours, and the one that ERNIEKit's launch scripts export.
CHOSEN_BY = ("ERNIEKIT_DEVICE", "PADDLE_XCCL_BACKEND")

_CUDA = "CUDA_VISIBLE_DEVICES"
_ILUVATAR = DeviceEntry(f"{OURS}.iluvatar", _CUDA, "iluvatar[0-9]*")
_METAX = DeviceEntry(f"{OURS}.metax", _CUDA)
_KUNLUNXIN = DeviceEntry(f"{OURS}.kunlunxin", "XPU_VISIBLE_DEVICES", "xpu[0-9]*", (_CUDA,))
_ASCEND = DeviceEntry(f"{OURS}.ascend", "ASCEND_RT_VISIBLE_DEVICES", "davinci[0-9]*")
_NVIDIA = DeviceEntry(f"{OURS}.cuda", _CUDA, "nvidia[0-9]*")

# In the order in which `auto` looks for them; the CPU is taken when none is there. NVIDIA's file takes the cuda cards
# that no other vendor has marked. Names of one line are one device.
_BUILT_IN = {
    "gpu": _NVIDIA,
    **dict.fromkeys(("iluvatar_gpu", "iluvatar"), _ILUVATAR),
    **dict.fromkeys(("metax_gpu", "metax"), _METAX),
    **dict.fromkeys(("xpu", "kunlunxin"), _KUNLUNXIN),
    **dict.fromkeys(("npu", "ascend"), _ASCEND),
    "musa": DeviceEntry(f"{OURS}.moore_threads", "MUSA_VISIBLE_DEVICES", "mtgpu.[0-9]*"),
    "amd": DeviceEntry(f"{OURS}.amd", "HIP_VISIBLE_DEVICES", "", ("ROCR_VISIBLE_DEVICES", _CUDA)),
    "nvidia": _NVIDIA,
    "intel": DeviceEntry(f"{OURS}.intel", "ZE_AFFINITY_MASK"),
    "mps": DeviceEntry(f"{OURS}.apple"),
    "generic": DeviceEntry(f"{OURS}.generic"),
    "cpu": DeviceEntry(f"{OURS}.cpu"),
}
DEVICES: dict[str, DeviceEntry] = {**others(os.environ.get(OTHERS, "")), **_BUILT_IN}
# gpu: whatever vendor's card torch calls cuda. xpu: Kunlunxin in Paddle, Intel in torch; what is present is taken.
FAMILIES = {"gpu": ("iluvatar", "metax", "kunlunxin", "amd", "nvidia"), "xpu": ("kunlunxin", "intel")}
# Names of torch and of vendors' own tools, for which people look here.
_MEANT = {"cuda": "gpu", "rocm": "amd", "hip": "amd"}

# What installed packages add: `name = module`, or `name = module:VARIABLE` with the variable of `visible`.
INSTALLED = Registry("device", {name: entry.module for name, entry in DEVICES.items()}, group="erniekit.devices")


def table() -> dict[str, DeviceEntry]:
    """DEVICES, with what installed packages add in front: `auto` takes an installed device first."""
    found = {}
    for name, plugin in INSTALLED.installed().items():
        module, _, visible = plugin.value.partition(":")
        found[name] = DeviceEntry(module, visible, package=plugin.distribution)
    return {**found, **DEVICES}


def check_variable() -> None:
    """Whether ERNIEKIT_DEVICES can be read: what cannot would be left out without a word."""
    check_others(os.environ.get(OTHERS, ""), taken=(AUTO, *_BUILT_IN))


def device_entry(name: str) -> DeviceEntry:
    """By name; installed packages are only looked at where it is none of DEVICES."""
    return DEVICES[name] if name in DEVICES else table()[name]


def accelerators() -> Iterator[tuple[str, DeviceEntry]]:
    """What `auto` may take before the CPU, in its order."""
    return ((name, entry) for name, entry in table().items() if name != "cpu" and name not in FAMILIES)


def instead(value: str) -> str:
    """What to write instead of a name of torch's, such as `cuda:0`; empty where none of ours is meant. A value names no
    single device: a variable of the vendor's chooses it."""
    name, _, index = value.lower().partition(":")
    name = _MEANT.get(name, name)
    if name not in DEVICES:
        return ""
    variable = DEVICES[name].visible
    chosen = f" {variable}={index} chooses the card" if variable and index.isdecimal() else ""
    return f"did you mean {name}?{chosen}"


def named(name: str, env: Mapping[str, str]) -> str:
    """The name in a `device` value: of `auto`, that of a variable if one is set. What old scripts export may be a
    device of Paddle's alone; what our variable names must be there."""
    for variable in CHOSEN_BY if name == AUTO else ():
        value, colon, index = env.get(variable, "").partition(":")
        if value and (value in DEVICES or value in INSTALLED):
            return value
        if value and value != AUTO and variable == CHOSEN_BY[0]:
            fix = f"one of: {', '.join([AUTO, *table()])}"
            if value.lower() in _MEANT:
                fix = f"did you mean {_MEANT[value.lower()]}{colon}{index}?"
            raise DeviceError(f"{value!r} is not a device", where=variable, fix=fix)
    return name


def named_one(name: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The one device that ERNIEKIT_DEVICE names (`npu:1`: the second that is visible), where `device` is `auto`."""
    value = env.get(CHOSEN_BY[0], "") if name == AUTO else ""
    _, colon, index = value.partition(":")
    if not colon:
        return ()
    listed = next((env[variable] for variable in entry_of(name, env).variables if env.get(variable)), "")
    visible = ["".join(item.split()) for item in listed.split(",") if item.strip()]
    if not index.isdecimal() or (visible and int(index) >= len(visible)):
        what = (
            f"{value!r} is not among {counted(len(visible), 'visible device')}"
            if visible
            else f"{value!r} has no number"
        )
        raise DeviceError(what, where=CHOSEN_BY[0], fix="a number from 0 on behind the colon, such as npu:0")
    return (visible[int(index)] if visible else index,)


def entry_of(name: str, env: Mapping[str, str]) -> DeviceEntry:
    """Of a `device` value. Of `auto`: the first that is visible, else the first that has a variable to be chosen by."""
    name = named(name, env)
    if name in FAMILIES:
        candidates = [DEVICES[name], *(DEVICES[each] for each in FAMILIES[name])]
    elif name == AUTO:
        candidates = [*(entry for _, entry in accelerators()), DEVICES["cpu"]]
        brought = [entry for entry in candidates if not entry.ours]
        candidates = [*brought, DEVICES["gpu"], *candidates]  # CUDA_VISIBLE_DEVICES only: NVIDIA's files count, too
    else:
        return device_entry(name)
    visible = (entry for entry in candidates if entry.count_visible(env))
    return next(visible, next((entry for entry in candidates if entry.visible), DEVICES["cpu"]))


def pick(name: str = AUTO, no_cuda: bool = False) -> Device:
    """The device for a `device` value, with what it lacks found out. `auto` takes the accelerator that is here, else
    the CPU."""
    from erniekit.devices.kernel_caches import keep_kernels
    from erniekit.devices.probes import probed

    check_variable()
    keep_kernels()
    name = "cpu" if no_cuda else named(name, os.environ)
    requested = name
    if name == AUTO:
        name = next((each for each, entry in accelerators() if entry.present_or_left_out()), "cpu")
    elif name in FAMILIES:
        name = next((each for each in FAMILIES[name] if DEVICES[each].present()), FAMILIES[name][-1])
    entry = device_entry(name)
    if not entry.present():
        raise _absent(requested, entry)
    return probed(*entry.open())


def _absent(name: str, entry: DeviceEntry) -> DeviceError:
    what = f"device {name!r} was asked for and torch finds none here"
    if name == "xpu":
        what += ": neither Kunlunxin's (Paddle's xpu; write kunlunxin) nor Intel's (torch's xpu; write intel)"
    fix = getattr(entry.load(), "WHEN_ABSENT", "run with device=cpu")
    return DeviceError(what, where="device", fix=fix)
