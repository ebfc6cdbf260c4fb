"""A class that says it can do something has the methods for it, and the page on devices says which they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from erniekit.devices import DEVICES
from erniekit.devices.base import GIB, Device
from erniekit.devices.promises import NEEDS, broken_promise
from erniekit.errors import DeviceError
from support import toy_device
from support.lazy_device import LazyDevice


class Bare(Device):
    vendor = "bare"


def saying(*attributes: str, **methods: object) -> Device:
    made: Device = type("Chip", (Bare,), {**dict.fromkeys(attributes, True), **methods})("Chip", "cpu", GIB)
    return made


@pytest.mark.parametrize("attribute", NEEDS)
def test_a_class_that_says_a_capability_and_lacks_its_methods_is_told_which(attribute: str) -> None:
    what, fix = broken_promise(saying(attribute))
    assert what.startswith(f"Chip says {attribute} and has no ")
    assert re.findall(r"no (\w+)\(\)", what) == list(NEEDS[attribute])
    assert f"row `{attribute}` of docs/adding-a-device.md" in fix
    *others, last = NEEDS[attribute]
    what, _ = broken_promise(saying(attribute, **dict.fromkeys(others, lambda self: None)))
    assert what == f"Chip says {attribute} and has no {last}()"
    assert broken_promise(saying(attribute, **dict.fromkeys(NEEDS[attribute], lambda self: None))) == ("", "")


def test_a_class_that_says_nothing_needs_no_method() -> None:
    assert broken_promise(saying()) == ("", "")


def test_no_device_a_class_and_fields_of_another_kind_are_told() -> None:
    for made, said in (
        ({"name": "Chip"}, "its make() gave dict, no erniekit.devices.base.Device"),
        (None, "its make() gave NoneType, no"),
        (Bare, "its make() gave the class Bare, no"),
        (Bare("Chip", "cpu", None), "the field total_memory of Bare is None"),  # type: ignore[arg-type]
        (Bare("Chip", torch.device("cpu"), 1), "the field type of Bare is device"),  # type: ignore[arg-type]
        (Bare("Chip", "chippy", 1), f"torch {torch.__version__} knows no device type 'chippy', which Bare names"),
    ):
        what, fix = broken_promise(made)
        assert what.startswith(said)
        assert "make()" in fix or fix.partition(" is ")[0] in what


def test_devices_of_the_tree_and_of_the_tests_keep_what_they_say() -> None:
    for entry in DEVICES.values():
        entry.load()
    kinds = [kind for kind in _below(Device) if kind.__module__.startswith("erniekit.")]
    assert len(kinds) > 10
    for kind in kinds:
        assert broken_promise(kind("Chip", "cpu", GIB)) == ("", ""), kind
    assert broken_promise(toy_device.make()) == ("", "")
    assert broken_promise(LazyDevice()) == ("", "")


def _below(kind: type[Device]) -> list[type[Device]]:
    return [found for one in kind.__subclasses__() for found in (one, *_below(one))]


def test_free_memory_that_is_not_known_is_half_or_what_is_not_reserved_and_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Bare("Chip of halves", "cpu", 8 * GIB)
    assert first.free_memory() == (4 * GIB, 8 * GIB)
    assert first.usable_memory(0.75) == 2 * GIB
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "half of 8.0 GiB" in said
    assert "gpu_memory_utilization" in said
    assert saying(reserved=lambda self: GIB // 4 * 3).free_memory() == (GIB // 4, GIB)
    with pytest.raises(DeviceError, match="Chip does not say how much memory it has") as caught:
        Bare("Chip", "cpu", 0).usable_memory(0.9)
    assert "Bare.free_memory()" in caught.value.where


def test_the_page_names_the_methods_that_each_capability_needs(root: Path) -> None:
    page = (root / "docs" / "adding-a-device.md").read_text(encoding="utf-8")
    assert {name: methods for name, methods in _needed(page).items() if name in NEEDS} == NEEDS


def _needed(page: str) -> Mapping[str, tuple[str, ...]]:
    """Of the table of what has to be written: first word in backticks -> the methods of the row's second column."""
    table = page.partition("| what is said or run |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    return {said.split("`")[1]: tuple(re.findall(r"`(\w+)\(\)?", methods)) for said, methods in rows}
