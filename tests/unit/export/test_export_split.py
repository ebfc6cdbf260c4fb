from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError
from erniekit.recipes.run import split_command


@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_split_keeps_every_bit_and_the_tokenizer_in_either_layout(base: Path, tmp_path: Path, layout: str) -> None:
    shutil.copytree(base, tmp_path / "run")
    assert split_command([f"output_dir={tmp_path / 'run'}", "max_shard_size=1", f"save_format={layout}"]) == 0
    out = tmp_path / "run" / "split_export"
    want, got = ModelFolder(base).build().state_dict(), ModelFolder(out).build().state_dict()
    assert ModelFolder(out).layout == layout
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert (out / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()


def test_split_takes_model_name_or_path_when_output_dir_has_no_model(base: Path, tmp_path: Path) -> None:
    assert split_command([f"output_dir={tmp_path / 'new'}", f"model_name_or_path={base}"]) == 0
    assert (tmp_path / "new" / "split_export" / "config.json").is_file()


def test_split_of_an_adapter_points_to_export(run: Path, base: Path) -> None:
    with pytest.raises(CheckpointError, match="holds an adapter") as error:
        split_command([f"output_dir={run}", f"model_name_or_path={base}"])
    assert "erniekit export" in error.value.fix


def test_split_of_nothing_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model") as error:
        split_command([f"output_dir={tmp_path}"])
    assert "model_name_or_path" in error.value.fix
