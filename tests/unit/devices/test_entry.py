"""A device's file of another package that lacks a function, raises or gives something else: three lines that name it,
exit code 2 and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit import devices
from erniekit.demo import tiny
from erniekit.devices import DeviceEntry, pick
from erniekit.devices.base import Finding
from erniekit.devices.entry import check_others
from erniekit.errors import ConfigError, DeviceError, ErnieKitError

CHIP = """
from erniekit.devices.base import GIB, Device, Finding
from erniekit.errors import ConfigError


class Chip(Device):
    vendor = "chip"


def present():
    return True


def count():
    return 1


def make():
    return Chip("Chip", "cpu", 8 * GIB)
"""
Write = Callable[..., DeviceEntry]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A device's file as somebody writes it: the usual one with functions defined anew at its end."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(name: str, anew: str = "", package: str = "") -> DeviceEntry:
        (tmp_path / f"{name}.py").write_text(f"{CHIP}\n\n{anew}\n")
        entry = DeviceEntry(name, package=package)
        monkeypatch.setattr(devices, "DEVICES", {**devices.DEVICES, name: entry})
        monkeypatch.delitem(sys.modules, name, raising=False)
        return entry

    return written


def refusal(device: str) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        pick(device)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_file_as_the_page_has_it_is_picked(write: Write) -> None:
    write("chip_well")
    assert pick("chip_well").name == "Chip"


@pytest.mark.parametrize("function", ["present", "count", "make"])
def test_a_file_without_one_of_its_functions_is_refused_with_its_name(write: Write, function: str) -> None:
    write(f"chip_without_{function}", f"del {function}")
    error = refusal(f"chip_without_{function}")
    assert error.what.endswith(f"'chip_without_{function}' cannot be used: its file has no function {function}()")
    assert error.where == "ERNIEKIT_DEVICES"
    assert "docs/adding-a-device.md" in error.fix


@pytest.mark.parametrize("function", ["present", "count", "make"])
def test_what_a_function_raises_is_told_with_its_line(write: Write, tmp_path: Path, function: str) -> None:
    name = f"chip_raising_{function}"
    write(name, f"def {function}():\n    raise OSError('no driver\\nsecond line')")
    error = refusal(name)
    assert error.what == f"the device {name!r} cannot be used: its {function}() raised OSError: no driver"
    file = tmp_path / f"{name}.py"
    line = file.read_text().splitlines().index("    raise OSError('no driver\\nsecond line')") + 1
    assert error.where == f"ERNIEKIT_DEVICES, {file}:{line}"


def test_a_file_that_ends_the_process_where_it_is_asked_is_refused_too(write: Write) -> None:
    write("chip_leaving", "def present():\n    raise SystemExit(0)")
    assert "present() raised SystemExit: 0" in refusal("chip_leaving").what
    write("chip_left", "raise SystemExit(3)")
    assert "does not load: SystemExit: 3" in refusal("chip_left").what
    write("chip_torn", "import nowhere_at_all")
    assert "no device can be read from 'chip_torn': No module named 'nowhere_at_all'" in refusal("chip_torn").what
    write("chip_typo", "PRESENT = no_such_name")
    assert "does not load: NameError" in refusal("chip_typo").what


def test_an_error_in_three_lines_of_its_own_is_shown_as_it_is(write: Write) -> None:
    write("chip_told", "def make():\n    raise ConfigError('firmware 3 is too old', where='chipctl', fix='install 4')")
    with pytest.raises(ConfigError) as caught:
        pick("chip_told")
    assert (caught.value.what, caught.value.where, caught.value.fix) == (
        "firmware 3 is too old", "chipctl", "install 4",
    )  # fmt: skip


def test_a_count_that_is_no_number_is_refused(write: Write) -> None:
    write("chip_uncounted", "def count():\n    return None")
    assert refusal("chip_uncounted").what.endswith("its count() gave NoneType, no whole number")


def test_a_type_that_is_only_a_word_to_torch_is_refused_before_a_run_is_prepared(write: Write) -> None:
    write("chip_word", "def make():\n    return Chip('Chip', 'vulkan', GIB)")
    error = refusal("chip_word")
    assert "torch puts no tensor on 'vulkan'" in error.what
    assert "import what brings 'vulkan' to torch" in error.fix


def test_the_first_tensor_of_a_rank_is_on_its_own_device(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = write("chip_bound", "BOUND = []\nChip.bind = lambda self, index: BOUND.append(index)")
    entry.open()
    assert entry.load().BOUND == []
    monkeypatch.setenv("LOCAL_RANK", "3")
    entry.open()
    assert entry.load().BOUND == [0], "one device: ranks share it"


def test_what_a_file_of_ours_raises_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from erniekit.devices import cpu

    monkeypatch.setattr(cpu, "present", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        DeviceEntry("erniekit.devices.cpu").present()


def test_a_broken_device_of_an_installed_package_is_left_out_of_auto_and_refused_by_name(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = "def present():\n    raise RuntimeError('driver exploded')"
    entry = write("chip_installed", raising, package="chip-kit 1.0")
    assert entry.present_or_left_out() is False
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'chip_installed' of the installed package chip-kit 1.0" in said
    assert "driver exploded" in said
    error = refusal("chip_installed")
    assert "its present() raised RuntimeError: driver exploded" in error.what
    assert error.where.startswith("entry point erniekit.devices, ")
    assert error.fix.startswith("update or uninstall chip-kit")
    named = write("chip_named", raising)
    with pytest.raises(DeviceError, match="driver exploded"):
        named.present_or_left_out()  # somebody asked for it in the variable


def test_findings_that_raise_or_are_none_are_findings(write: Write) -> None:
    raising = write("chip_found", "def findings():\n    raise RuntimeError('no chipctl')").findings()
    assert [(found.ok, found.what) for found in raising] == [
        (False, "the device 'chip_found' cannot be looked at: its findings() raised RuntimeError: no chipctl")
    ]
    none = write("chip_found_none", "def findings():\n    return None").findings()
    assert not none[0].ok
    assert write("chip_quiet").findings() == []
    good = write("chip_good", "def findings():\n    return [Finding(True, 'chipctl 3')]").findings()
    assert good == [Finding(True, "chipctl 3")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("=a", "'=a' has no name of a device"),
        ("toy=a,=b", "'=b' has no name of a device"),
        ("my chip=a", "'my chip=a' has no name"),
        ("toy=", "'toy=' has no module"),
        ("toy=a.b.", "'toy=a.b.' has no module"),
        ("toy=my-kit", "'toy=my-kit' has no module"),
        ("toy==a", "'toy==a' has no module"),
        ("toy=a other=b", "'toy=a other=b' has no module"),
        ("toy=:V", "'toy=:V' has no module"),
        ("toy=a:", "'toy=a:' has no variable"),
        ("toy=a:V W", "'toy=a:V W' has no variable"),
        ("toy=a,toy=b", "'toy' is named twice"),
        ("cpu=a", "'cpu=a' cannot be added: the name cpu is built in"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(DeviceError) as caught:
        check_others(text, taken=("cpu",))
    assert said in caught.value.what
    assert caught.value.where == "ERNIEKIT_DEVICES"


def test_a_variable_that_can_be_read_is_not_refused() -> None:
    for text in ("", " ", "toy=my.toy:TOY_VISIBLE, my-chip=some.where,", "toy_device"):
        check_others(text, taken=("cpu",))


def typed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "erniekit", *words]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=300
    )


def test_a_command_on_any_device_refuses_a_variable_that_cannot_be_read_and_help_is_there(tmp_path: Path) -> None:
    done = typed("train", "device=cpu", "model_name_or_path=nowhere", ERNIEKIT_DEVICES="=a")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.splitlines() == [
        "error: '=a' has no name of a device",
        "where: ERNIEKIT_DEVICES",
        "fix:   NAME=MODULE or NAME=MODULE:VARIABLE, with commas between",
    ]
    assert typed("help", ERNIEKIT_DEVICES="=a").returncode == 0


def test_a_model_is_answered_by_a_device_that_does_not_know_its_free_memory(tmp_path: Path) -> None:
    (tmp_path / "chip_file.py").write_text(CHIP)
    model = tiny.make_tiny_model(tmp_path / "tiny", family="llama")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = ("chat", str(model), "device=chip", "--prompt", "hi", "max_new_tokens=2")
    done = typed(*words, ERNIEKIT_DEVICES="chip=chip_file", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("Chip has no free_memory()") == 1
    assert "half of 8.0 GiB" in done.stderr


def test_every_refusal_is_one_of_three_lines(write: Write) -> None:
    write("chip_class", "make = Chip.__class__")
    with pytest.raises(ErnieKitError) as caught:
        pick("chip_class")
    assert [line.partition(":")[0] for line in caught.value.lines()] == ["error", "where", "fix"]
