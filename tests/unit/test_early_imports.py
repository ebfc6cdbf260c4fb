"""Imports at a run's start: beside torch only what does without it, and jax only where it was wanted."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from erniekit.early_imports import OF_KERNELS, import_beside_torch, without_collections, without_jax


@pytest.mark.parametrize("compiles", [True, False])
def test_what_is_imported_beside_torch_does_not_import_it(compiles: bool) -> None:
    """Else the thread would only wait. What the compiler needs takes seconds: only where it is used."""
    code = (
        f"import sys; from erniekit.early_imports import import_beside_torch; import_beside_torch({compiles}).join(); "
        "print('sympy' in sys.modules, 'networkx' in sys.modules, 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(compiles), str(compiles), "False"]


def test_a_library_that_does_not_load_is_left_to_who_needs_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cutlass.py").write_text("raise RuntimeError('an old driver')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cutlass" in OF_KERNELS
    import_beside_torch(compiles=False).join()
    with pytest.raises(RuntimeError, match="an old driver"):
        __import__("cutlass")


def test_jax_cannot_be_imported_meanwhile_and_can_afterwards(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    (tmp_path / "jax.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with without_jax(), pytest.raises(ImportError):
        __import__("jax")
    assert __import__("jax").__file__ == str(tmp_path / "jax.py")
    monkeypatch.delitem(sys.modules, "jax")


def test_a_jax_that_is_in_use_stays() -> None:
    own = ModuleType("jax")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax", own)
        with without_jax():
            assert __import__("jax") is own
        assert sys.modules["jax"] is own


def test_collections_go_on_after_imports() -> None:
    assert gc.isenabled()
    with without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
