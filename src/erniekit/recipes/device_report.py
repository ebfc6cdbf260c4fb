"""`erniekit doctor` without a recipe: which devices this machine has, what of their drivers and packages is not well,
and which capabilities work when tried. Called by doctor.py.

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
from erniekit.log import paint, say

SECONDS = 120  # for all probes of one device: a first Triton kernel takes seconds, an unanswering driver for ever
_TRIED = "tried: "  # before the line of a probe's answer, among whatever a vendor's libraries print


@dataclass(frozen=True)
class Tried:
    """What the probing process said: the device's name, and why each capability that does not work does not."""

    name: str
    lacks: dict[str, str]
    problem: str = ""  # the process itself ended, or took too long; then the rest is what was said before


def report(cfg: RunConfig) -> int:
    """Prints it; 0 where a device was found and is well, else 1."""
    words = _words(cfg.train.device)
    ok = True
    for word in words:
        ok &= _one(word, device_entry(word), asked=cfg.train.device != AUTO)
    return 0 if ok else 1


def _words(asked: str) -> list[str]:
    """One word for each device: of `auto` all that are present, and those whose packages are here without a device."""
    asked = named(asked, os.environ)
    if asked != AUTO and asked not in FAMILIES:
        return [asked]
    entries = table()
    known = FAMILIES.get(asked, tuple(entries))
    once = {entries[word].module: word for word in reversed(known) if word not in FAMILIES}
    there = [word for word in reversed(list(once.values())) if entries[word].present()]
    if asked == AUTO:
        there += [word for word in _half_installed() if word not in there]
    return there or [known[-1]]


def _half_installed() -> list[str]:
    """Devices whose plug-in is installed and does not work: the wheel is there, the vendor's runtime is not set up."""
    from importlib.util import find_spec

    plugins = {word: getattr(DEVICES[word].load(), "PLUGIN", "") for word in ("npu", "kunlunxin", "musa")}
    return [word for word, plugin in plugins.items() if plugin and find_spec(plugin) is not None]


def _one(word: str, entry: DeviceEntry, asked: bool) -> bool:
    module = entry.load()
    present = module.present()
    found: list[Finding] = module.findings() if hasattr(module, "findings") else []
    say(f"{paint('device', 'bold')}   {word}: " + (f"{module.count()} here" if present else "none that torch sees"))
    say(f"         {getattr(module, 'EVIDENCE', entry.origin)}")
    for finding in found:
        _say(finding)
    if not present:
        if asked:
            _say(Finding(False, "it was asked for and is not here", getattr(module, "WHEN_ABSENT", "device=cpu")))
        return not asked and all(f.ok for f in found)
    tried = try_in_a_process(word)
    if tried.name:
        say(f"         {tried.name}")
    for name in capabilities.CAPABILITIES:
        if name in tried.lacks:
            _say(Finding(False, capabilities.line(name, tried.lacks[name])))
    if tried.problem:
        names = ", ".join(capabilities.CAPABILITIES)
        _say(Finding(False, tried.problem, f"{WITHOUT}=NAME leaves one out; NAME is any of {names}"))
    elif not tried.lacks:
        say(f"         {paint('ok', 'green')}: all that it claims works")
    return all(f.ok for f in found) and not tried.problem


def _say(finding: Finding) -> None:
    say(f"         {paint('ok', 'green') if finding.ok else paint('no', 'yellow')}   {finding.what}")
    if finding.fix and not finding.ok:
        say(f"              fix: {finding.fix}")


def try_in_a_process(word: str, seconds: float = SECONDS) -> Tried:
    """The probes of a device, one after the other, in a process of their own."""
    command = [sys.executable, "-c", "from erniekit.recipes.device_report import answer; answer()", word]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    said = [json.loads(line.removeprefix(_TRIED)) for line in out.splitlines() if line.startswith(_TRIED)]
    name = next((s["device"] for s in said if "device" in s), "")
    lacks = {s["name"]: s["why"] for s in said if s.get("why")}
    if any("end" in s for s in said):
        return Tried(name, lacks)
    last = next((s["trying"] for s in reversed(said) if "trying" in s), "the device itself")
    how = f"did not answer in {seconds:g} s" if time.monotonic() - began >= seconds else _ended(process.returncode)
    return Tried(name, lacks, f"trying {last}: the process {how}")


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def answer() -> None:
    """In the process of its own: sys.argv[1] is the word."""
    from erniekit.devices.probes import UNCLAIMED, skipped, try_one

    def tell(**what: Any) -> None:
        print(f"\n{_TRIED}{json.dumps(what)}", flush=True)

    device = device_entry(sys.argv[1]).load().make()
    tell(device=device.name)
    for name in capabilities.CAPABILITIES:
        if name in device.lacks or name in skipped():
            tell(name=name, why=device.lacks.get(name, f"left out by {WITHOUT}"))
        elif name in device.claims:
            tell(trying=name)
            tell(name=name, why=try_one(name, device))
        elif name in CLAIMED_BY and name != "bf16" and device.vendor != "cpu":
            tell(name=name, why=UNCLAIMED)
    tell(end=True)
