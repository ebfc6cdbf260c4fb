"""Ascend NPUs through torch_npu and CANN. Described from torch_npu's source and trials of its wheel without a card;
none has run here. torch_npu requires the CPU build of exactly the torch it was made for.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import ClassVar

import torch

from erniekit.devices import accelerator
from erniekit.devices.accelerator import AcceleratorDevice
from erniekit.devices.base import Device, Finding
from erniekit.devices.findings import NEVER_RUN, package_version, tool_finding, visible_finding

PLUGIN = "torch_npu"
SET_UP = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
EVIDENCE = NEVER_RUN
WHEN_ABSENT = f"check npu-smi info, {SET_UP}, and that torch_npu imports; or run with device=cpu"


class AscendDevice(AcceleratorDevice):
    vendor: ClassVar[str] = "ascend"
    backend: ClassVar[str] = "cpu:gloo,npu:hccl"
    pins_memory: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True

    def same_bits(self) -> None:
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        super().same_bits()


def present() -> bool:
    return accelerator.is_there("npu", PLUGIN)


def count() -> int:
    return accelerator.count_of("npu", PLUGIN)


def make() -> Device:
    return accelerator.make(AscendDevice, "npu", "Ascend NPU")


def findings() -> list[Finding]:
    wheel = package_version("torch-npu")
    found = [tool_finding("npu-smi", "the driver's tool is not on PATH"), visible_finding("ASCEND_RT_VISIBLE_DEVICES")]
    if wheel is None or find_spec(PLUGIN) is None:
        fix = f"pip install torch-npu=={torch.__version__.partition('+')[0]}.* (the CPU build of that torch)"
        return [*found, Finding(False, "torch_npu is not installed", fix)]
    ours, theirs = (text.split("+")[0].split(".")[:3] for text in (torch.__version__, wheel))
    match = ours == theirs
    fix = f"torch_npu {wheel} needs torch {'.'.join(theirs)}"
    found.append(Finding(match, f"torch_npu {wheel} with torch {torch.__version__}", "" if match else fix))
    try:
        __import__(PLUGIN)
    except Exception as error:  # libhccl.so, libascendcl.so and others are CANN's
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        found.append(Finding(False, f"torch_npu does not import: {why}", SET_UP))
    return found
