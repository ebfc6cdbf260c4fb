"""`erniekit doctor` without a recipe: which devices this machine has, what of their drivers and packages is not well,
and which capabilities work when tried. Called by doctor_command.py.

Capabilities are tried in a process of its own with a time limit: a vendor's library that hangs or ends the process is a
finding here, where it would be the end of a run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from erniekit import capabilities
from erniekit.config import RunConfig
from erniekit.devices import AUTO, DEVICES, FAMILIES, DeviceEntry, device_entry, named, table
from erniekit.devices.base import CLAIMED_BY, Finding
from erniekit.devices.probes import WITHOUT
from erniekit.errors import ErnieKitError
from erniekit.log import emit, paint

SECONDS = 120  # for all probes of one device: a first Triton kernel takes seconds, an unanswering driver for ever
_TRIED = "tried: "  # before the line of a probe's answer, among whatever a vendor's libraries print


@dataclass(frozen=True)
class Tried:
    """Results of the probing process: the device's name, and why each capability that does not work does not."""

    name: str
    lacks: dict[str, str]
    problem: str = ""  # the process itself ended, or took too long; then the rest is what it reported before
    fix: str = ""  # where the device was refused


def report(cfg: RunConfig) -> int:
    """Prints it; 0 where a device was found and is well, else 1."""
    keys = _device_keys(cfg.train.device)
    ok = True
    for key in keys:
        ok &= _one(key, device_entry(key), requested=cfg.train.device != AUTO)
    return 0 if ok else 1


def _device_keys(requested: str) -> list[str]:
    """One key for each device: of `auto` all that are present, and those whose packages are here without a device."""
    requested = named(requested, os.environ)
    if requested != AUTO and requested not in FAMILIES:
        return [requested]
    entries = table()
    known = FAMILIES.get(requested, tuple(entries))
    once = {entries[key].module: key for key in reversed(known) if key not in FAMILIES}
    there = [key for key in reversed(list(once.values())) if _to_show(entries[key])]
    if requested == AUTO:
        there += [key for key in _half_installed() if key not in there]
    return there or [known[-1]]


def _to_show(entry: DeviceEntry) -> bool:
    """What is here, and what cannot say whether it is: the error is among what is found."""
    try:
        return entry.present()
    except ErnieKitError:
        return True


def _half_installed() -> list[str]:
    """Devices whose plug-in is installed and does not work: the wheel is there, the vendor's runtime is not set up."""
    from importlib.util import find_spec

    plugins = {key: getattr(DEVICES[key].load(), "PLUGIN", "") for key in ("npu", "kunlunxin", "musa")}
    return [key for key, plugin in plugins.items() if plugin and find_spec(plugin) is not None]


def _one(key: str, entry: DeviceEntry, requested: bool) -> bool:
    try:
        module, present = entry.load(), entry.present()
    except ErnieKitError as error:
        emit(f"{paint('device', 'bold')}   {key}: not known whether it is here")
        _print(Finding(False, error.what, error.fix))
        return False
    found = entry.findings()
    number = "none that torch sees"
    if present:
        try:
            number = f"{entry.count()} here"
        except ErnieKitError as error:
            number, found = "here", [*found, Finding(False, error.what, error.fix)]
    emit(f"{paint('device', 'bold')}   {key}: {number}")
    emit(f"         {getattr(module, 'EVIDENCE', entry.origin)}")
    for finding in found:
        _print(finding)
    if not present:
        if requested:
            _print(Finding(False, "it was requested and is absent", getattr(module, "WHEN_ABSENT", "device=cpu")))
        return not requested and all(f.ok for f in found)
    tried = try_in_a_process(key)
    if tried.name:
        emit(f"         {tried.name}")
    for name in capabilities.CAPABILITIES:
        if name in tried.lacks:
            _print(Finding(False, capabilities.line(name, tried.lacks[name])))
    if tried.problem:
        fix = tried.fix or f"{WITHOUT}=NAME leaves one out; NAME is any of {', '.join(capabilities.CAPABILITIES)}"
        if tried.problem not in [finding.what for finding in found]:
            _print(Finding(False, tried.problem, fix))
    elif not tried.lacks:
        emit(f"         {paint('ok', 'green')}: all that it claims works")
    return all(f.ok for f in found) and not tried.problem


def _print(finding: Finding) -> None:
    emit(f"         {paint('ok', 'green') if finding.ok else paint('no', 'yellow')}   {finding.what}")
    if finding.fix and not finding.ok:
        emit(f"              fix: {finding.fix}")


def try_in_a_process(key: str, seconds: float = SECONDS) -> Tried:
    """The probes of a device, one after the other, in a process of their own."""
    command = [sys.executable, "-c", "from erniekit.recipes.device_report import answer; answer()", key]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    reports = [json.loads(line.removeprefix(_TRIED)) for line in out.splitlines() if line.startswith(_TRIED)]
    name = next((s["device"] for s in reports if "device" in s), "")
    lacks = {s["name"]: s["why"] for s in reports if s.get("why")}
    if any("end" in s for s in reports):
        return Tried(name, lacks)
    if (refused := next((s for s in reports if "refused" in s), None)) is not None:
        return Tried(name, lacks, refused["refused"], refused["fix"])
    last = next((s["trying"] for s in reversed(reports) if "trying" in s), "the device itself")
    how = f"did not answer in {seconds:g} s" if time.monotonic() - began >= seconds else _ended(process.returncode)
    return Tried(name, lacks, f"trying {last}: the process {how}")


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def answer() -> None:
    """In the process of its own: sys.argv[1] is the device's key."""
    from erniekit.devices.probes import UNCLAIMED, skipped, try_one

    def report(**what: Any) -> None:
        print(f"\n{_TRIED}{json.dumps(what)}", flush=True)

    try:
        device, _ = device_entry(sys.argv[1]).open()
    except ErnieKitError as error:
        return report(refused=error.what, fix=error.fix)
    report(device=device.name)
    for name in capabilities.CAPABILITIES:
        if name in device.lacks or name in skipped():
            report(name=name, why=device.lacks.get(name, f"left out by {WITHOUT}"))
        elif name in device.claims:
            report(trying=name)
            report(name=name, why=try_one(name, device))
        elif name in CLAIMED_BY and name != "bf16" and device.vendor != "cpu":
            report(name=name, why=UNCLAIMED)
    report(end=True)
