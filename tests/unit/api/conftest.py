"""What the tests of the Python interface share: a tiny model, rows, and the keys of a run of some steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from erniekit import registry
from erniekit.demo.tiny import make_tiny_model

KEYS = dict(
    compute_type="fp32", device="cpu", learning_rate=5e-3, max_seq_len=64, doctor="off", report_to="none",
    dataset_num_proc=1, disable_tqdm=True,
)  # fmt: skip


def talk(number: int) -> dict[str, Any]:
    asked, said = f"What is {number}?", f"It is number {number}."
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


ROWS = [talk(k) for k in range(12)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path that packages are installed into; what was imported from it is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    known = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    registry._warn_clash.cache_clear()
    yield folder
    registry._all_plugins.cache_clear()
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
