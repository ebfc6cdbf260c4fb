"""DeviceEntry: which file drives a kind of device, and what that file is asked. Imports no torch.

A file of another package may lack a function, or raise whatever it likes: either is an error of three lines that names
the package. What a file of ours raises is ours to correct, and stays a traceback. Used by devices/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import DeviceError, ErnieKitError
from erniekit.log import warn
from erniekit.printable import error_line
from erniekit.registry import foreign_code, note_foreign

if TYPE_CHECKING:
    from erniekit.devices.base import Device, Finding

OTHERS = "ERNIEKIT_DEVICES"  # names devices of other packages; a variable, because every rank inherits it
OURS = "erniekit.devices"
PAGE = "docs/adding-a-device.md"
FUNCTIONS = ("present", "count", "make")


@dataclass(frozen=True)
class DeviceEntry:
    """module: has make() -> Device, present() and count()."""

    module: str
    visible: str = ""  # the variable that lists which of the machine's devices are ours
    files: str = ""  # its device files in /dev, one for each device; counted without a driver
    also_visible: tuple[str, ...] = ()  # variables that the vendor's own scripts set in its place
    package: str = ""  # the installed package whose entry point brings it

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.visible, *self.also_visible) if self.visible else ()

    @property
    def ours(self) -> bool:
        return self.module.startswith(f"{OURS}.")

    @property
    def bringer(self) -> str:
        return f"of the installed package {self.package}" if self.package else f"named by {OTHERS}"

    @property
    def origin(self) -> str:
        """Where it comes from, of one whose file has no EVIDENCE."""
        silent = "which does not say whether it ran on real hardware"
        return f"{self.module}, {silent if self.ours else self.bringer}"

    def load(self) -> Any:
        """Its file, which has the three functions."""
        if not self.ours:
            note_foreign(self.module, self.bringer)
        try:
            found = import_module(self.module)
        except ModuleNotFoundError as error:
            if self.ours:
                named = f"the device's file {self.module} does not load: {error}"
                raise DeviceError(named, where="DEVICES", fix=f"{PAGE} says what it has") from error
            if not self.package:
                named = f"no device can be read from {self.module!r}: {error}"
                fix = f"word=module with commas between; check {OTHERS} and PYTHONPATH"
                raise DeviceError(named, where=OTHERS, fix=fix) from error
            raise self._error(f"does not load: {error_line(error)}", error) from error
        except (Exception, SystemExit) as error:  # it is another program: anything may come out of it
            if self.ours:
                raise
            raise self._error(f"does not load: {error_line(error)}", error) from error
        if missing := [f"{name}()" for name in FUNCTIONS if not callable(getattr(found, name, None))]:
            raise self._error(f"cannot be used: its file has no function {', no '.join(missing)}")
        return found

    def present(self) -> bool:
        return bool(self._ask("present"))

    def present_or_left_out(self) -> bool:
        """As `present`; a device of an installed package that raises counts as absent, after a warning that names the
        package. For `device: auto`: a broken plug-in must not stop a run that does not use it."""
        try:
            return self.present()
        except ErnieKitError as error:
            if not self.package:
                raise
            warn(f"{error.what} (entry point {OURS}: it is left out)")
            return False

    def count(self) -> int:
        """How many torch sees."""
        found = self._ask("count")
        if not isinstance(found, Integral):
            raise self._error(f"cannot be used: its count() gave {type(found).__name__}, no whole number")
        return int(found)

    def make(self) -> Device:
        from erniekit.devices.promises import broken_promise

        made: Device = self._ask("make")
        problem, fix = broken_promise(made)
        if problem:
            raise self._error(f"cannot be used: {problem}", fix=fix)
        return made

    def open(self) -> tuple[Device, int]:
        """The device of this process and how many there are; of another package's, one that torch can put a tensor
        on."""
        from erniekit.devices.promises import first_tensor

        made, count = self.make(), self.count()
        if not self.ours:
            try:
                first_tensor(made, count)
            except (Exception, SystemExit) as error:
                what = f"cannot be used: torch puts no tensor on {made.type!r}: {error_line(error)}"
                fix = f"import what brings {made.type!r} to torch in present() and make()"
                raise self._error(what, error, fix) from error
        return made, count

    def findings(self) -> list[Finding]:
        """What `erniekit doctor` looks at; what goes wrong in doing so is a finding, too."""
        from erniekit.devices.base import Finding

        if not hasattr(self.load(), "findings"):
            return []
        try:
            return [Finding(*finding) for finding in self._ask("findings")]
        except ErnieKitError as error:
            return [Finding(False, error.what, error.fix)]
        except TypeError as error:
            return [
                Finding(False, f"findings() gave no list of Finding: {error_line(error)}", f"{PAGE} says what it gives")
            ]

    def _ask(self, function: str) -> Any:
        module = self.load()
        try:
            return getattr(module, function)()
        except ErnieKitError:  # its own three lines
            raise
        except (Exception, SystemExit) as error:
            if self.ours:
                raise
            useless = "cannot be used" if function in FUNCTIONS else "cannot be looked at"
            fix = f"correct what it names, or that file: {PAGE} says what it has"
            raise self._error(f"{useless}: its {function}() raised {error_line(error)}", error, fix) from error

    def _error(self, problem: str, error: BaseException | None = None, fix: str = "") -> DeviceError:
        """problem: what follows behind its name. error: what its code raised, for the line."""
        named, where = f"the device {self.module!r}", "DEVICES" if self.ours else OTHERS
        todo = fix or f"correct it: {PAGE} says what it has"
        if self.package:
            named += f" of the installed package {self.package}"
            where = f"entry point {OURS}"
            todo = f"update or uninstall {self.package.partition(' ')[0]}" + (f"; its authors: {fix}" if fix else "")
        elif not self.ours:
            todo += f"; or take it out of {OTHERS}"
        if error is not None and (code := foreign_code(error)) is not None:
            where += f", {code.place}"
        return DeviceError(f"{named} {problem}", where=where, fix=todo)

    def count_visible(self, env: Mapping[str, str]) -> int:
        """Devices of this machine that are ours, without a call to the driver: by variable, else by device file."""
        listed = next((env[name] for name in self.variables if name in env), None)
        if listed is None:
            return len(list(Path("/dev").glob(self.files))) if self.files else 0
        count = 0
        for item in listed.split(","):
            if not item.strip() or item.strip().startswith("-"):  # CUDA stops reading at the first that is none
                break
            count += 1
        return count

    def show(self, env: Mapping[str, str], chosen: tuple[str, ...] = ()) -> dict[str, str]:
        """The variables as ranks should have them: `chosen`, else as they are without blanks, at which Ascend's runtime
        stops reading ("0, 1" would be device 0 only)."""
        if chosen:
            given = [name for name in self.variables[1:] if name in env]
            return dict.fromkeys([*self.variables[:1], *given], ",".join(chosen))
        return {name: "".join(env[name].split()) for name in self.variables if name in env}


def others(text: str) -> dict[str, DeviceEntry]:
    """`name=module` or `name=module:VARIABLE`, with commas between. Read when config is imported: what is wrong with it
    is reported by `check_others`, and when the device is used."""
    parts = [_parts(item) for item in _items(text)]
    return {name: DeviceEntry(module or name, visible) for name, module, visible in parts if name}


def check_others(text: str, taken: Collection[str]) -> None:
    """An error for what would be left out without a word. taken: names that are not for other packages to give."""
    names: list[str] = []
    for item in _items(text):
        name, module, visible = _parts(item)
        if not re.fullmatch(r"[\w.-]+", name):
            problem = f"{item!r} has no name of a device"
        elif not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            problem = f"{item!r} has no module"
        elif item.endswith(":") or not re.fullmatch(r"\w*", visible):
            problem = f"{item!r} has no variable behind its colon"
        elif name in taken:
            problem = f"{item!r} cannot be added: the name {name} is built in"
        elif name in names:
            problem = f"{name!r} is named twice"
        else:
            names.append(name)
            continue
        raise DeviceError(problem, where=OTHERS, fix="NAME=MODULE or NAME=MODULE:VARIABLE, with commas between")


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parts(item: str) -> tuple[str, str, str]:
    """Name, module and variable; a module alone is called as it is."""
    name, equals, rest = item.partition("=")
    module, _, visible = rest.partition(":") if equals else (name, "", "")
    return name.strip(), module.strip(), visible.strip()
