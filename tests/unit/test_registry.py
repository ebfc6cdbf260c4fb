"""Whose code an error came from: a plug-in's, ours, or ours that a plug-in called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from erniekit import registry
from erniekit.errors import ConfigError
from erniekit.launch import failure
from erniekit.registry import Plugin, Registry, foreign_code, owner_of

KIT = """
import json

from erniekit.registry import Registry


def own():
    raise KeyError("moon")


def below():
    return json.loads("{")


def ours():
    return Registry("moon", {}).distribution("full")
"""
RAISES = '    raise KeyError("moon")'


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_foreign", {})
    for name in ("moon_package", "moon_package.inside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = tmp_path / "moon_package"
    package.mkdir()
    (package / "__init__.py").write_text("from moon_package import inside\n")
    (package / "inside.py").write_text(KIT)
    found: ModuleType = Plugin("erniekit.models", "moon", "moon_package", "moon-kit 1.0").load("model")
    return found


def caught(function: str, kit: ModuleType) -> Exception:
    with pytest.raises(Exception, match=r".") as raised:
        getattr(kit.inside, function)()
    return raised.value


def line_of(text: str) -> int:
    return KIT.splitlines().index(text) + 1


def test_a_line_of_a_plug_in_is_named_also_where_a_library_raised_below_it(kit: ModuleType) -> None:
    file = kit.inside.__file__
    for function, line in (("own", RAISES), ("below", '    return json.loads("{")')):
        code = foreign_code(caught(function, kit))
        assert code is not None
        assert code.place == f"{file}:{line_of(line)}"
        assert code.line == f"{code.place}, of the installed package moon-kit 1.0: a fault of that code"


def test_our_code_below_a_plug_in_may_be_at_fault_too(kit: ModuleType) -> None:
    code = foreign_code(caught("ours", kit))
    assert code is not None
    assert not code.inmost
    assert code.line.endswith("a fault of that code, or of erniekit's that it called")


def test_an_error_that_came_of_a_plug_ins_names_its_line(kit: ModuleType) -> None:
    try:
        try:
            kit.inside.own()
        except KeyError as error:
            raise RuntimeError("a step failed") from error
    except RuntimeError as error:
        code = foreign_code(error)
    assert code is not None
    assert code.inmost
    assert code.place == f"{kit.inside.__file__}:{line_of(RAISES)}"


def test_code_that_no_plug_in_brought_is_nobodys(kit: ModuleType) -> None:
    with pytest.raises(ConfigError) as raised:
        Registry("moon", {}).get("full")
    assert foreign_code(raised.value) is None
    assert owner_of("moon_package.inside") == "of the installed package moon-kit 1.0"
    assert owner_of("moon_package_of_others") == ""
    Plugin("erniekit.devices", "c", "erniekit.devices.cpu", "odd-kit 1.0").load("device")
    assert owner_of("erniekit.errors") == "", "ours stays ours whoever names it"


def test_a_rank_that_ends_by_a_plug_ins_fault_says_whose_it_is(kit: ModuleType) -> None:
    assert failure._lines(caught("own", kit))[-1].startswith("code:  ")
    with pytest.raises(ZeroDivisionError) as raised:
        importlib.import_module("operator").floordiv(1, 0)
    assert not [line for line in failure._lines(raised.value) if line.startswith("code:")]
