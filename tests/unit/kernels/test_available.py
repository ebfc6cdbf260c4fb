"""Whether Triton kernels can be built: asked of the machine, told in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.kernels.available import _why_not_built


def test_a_machine_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the dev extra installs it on Linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in (_why_not_built.__wrapped__() or "")
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    assert _why_not_built.__wrapped__() is None
