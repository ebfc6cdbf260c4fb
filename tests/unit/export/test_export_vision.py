"""Export of a vision model whose proof of preprocessing is damaged: the user's own file is named, and the way on."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.data.vision import proof_file
from erniekit.errors import CheckpointError
from erniekit.export.run import export
from support.seeing import seeing_folder


@pytest.mark.parametrize(
    "content", [b"", b'{"version": 1, "rows": [', b"[]", b'{"rows": [{"media": 3}]}', b'{"rows": []}', b"\xff\xfe\0"]
)
def test_a_damaged_proof_is_told_with_the_file_that_is_the_users_before_anything_is_written(
    tmp_path: Path, content: bytes
) -> None:
    folder = seeing_folder(tmp_path / "run")
    (folder / proof_file.FILE).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        export(folder, None, tmp_path / "out")
    assert error.value.where == str(folder / proof_file.FILE)
    assert f"move {proof_file.FILE} away" in error.value.fix
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_without_the_damaged_proof_the_model_is_exported(tmp_path: Path) -> None:
    folder = seeing_folder(tmp_path / "run")
    assert (export(folder, None, tmp_path / "out") / "config.json").is_file()
