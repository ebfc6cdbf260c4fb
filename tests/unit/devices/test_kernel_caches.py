"""Compiled kernels lie where the next run finds them, unless the user's own variables say otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from erniekit.devices.kernel_caches import FLASH4, FOLDERS, variables


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path))
    return tmp_path


def test_every_compiler_gets_a_folder_of_the_user_that_is_named_by_version(cache: Path) -> None:
    found = variables({})
    assert set(found) == {*FOLDERS, FLASH4}
    assert found[FLASH4] == "1", "without it FlashAttention-4 makes its kernels anew in every process"
    for name in FOLDERS:
        assert cache in Path(found[name]).parents
        assert torch.__version__ in found[name]


def test_variables_of_the_user_win() -> None:
    own = {"TORCHINDUCTOR_CACHE_DIR": "/mine", "QUACK_CACHE_DIR": "/mine"}
    found = variables(own)
    assert not set(own) & set(found)
    assert "TRITON_CACHE_DIR" not in found, "torch puts it into its own folder, which is the user's"
    assert FLASH4 not in variables({FLASH4: "0"})
    assert variables(dict.fromkeys(FOLDERS, "/mine")) == {}


def test_where_the_folder_cannot_be_made_compilers_keep_their_own_ways(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("ERNIEKIT_CACHE", str(cache / "file"))
    assert variables({}) == {}


def test_a_process_that_picks_its_device_compiles_into_that_folder(cache: Path) -> None:
    code = "import os; from erniekit.devices import pick; pick('cpu'); print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    env = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert cache in Path(done.stdout.strip()).parents
