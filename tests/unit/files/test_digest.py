"""Digests of files that several processes wrote at once: of their stretches, and of nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest, writer
from erniekit.checkpoint.manifest import Damaged
from erniekit.files.digest import Digest, joined
from erniekit.files.record import content_of, has_digest

PARTS = [b"abc", b"de", b"fghijklm"]
WHOLE = b"".join(PARTS)
OF_PARTS = joined([3, 2, 8], [hashlib.sha256(part).digest() for part in PARTS])


def digest(data: bytes, like: str, step: int) -> str:
    out = Digest(like)
    for start in range(0, len(data), step):
        out.update(data[start : start + step])
    return out.text()


@pytest.mark.parametrize("step", [1, 2, 3, 5, 13])
def test_a_file_has_the_digest_of_its_stretches_however_it_is_read(step: int) -> None:
    assert digest(WHOLE, OF_PARTS, step) == OF_PARTS
    assert digest(WHOLE, "", step) == hashlib.sha256(WHOLE).hexdigest()


@pytest.mark.parametrize("other", [WHOLE[:-1], WHOLE + b"n", WHOLE + WHOLE, b"", WHOLE.replace(b"e", b"E")])
def test_other_bytes_more_or_fewer_have_another_digest(other: bytes) -> None:
    assert digest(other, OF_PARTS, 4) != OF_PARTS


@pytest.mark.parametrize("like", ["0:ff", "3+:ff", "-3:ff", "3+x:ff", ":ff", "9999999999999999999999:ff"])
def test_a_form_that_none_has_is_compared_as_a_plain_sha256(like: str) -> None:
    assert digest(WHOLE, like, 4) == hashlib.sha256(WHOLE).hexdigest()


def test_every_reader_of_a_folder_compares_by_the_digest_that_is_recorded(tmp_path: Path) -> None:
    def write(folder: Path) -> dict[str, manifest.FileRecord]:
        (folder / "file").write_bytes(WHOLE)
        return {"file": manifest.FileRecord(len(WHOLE), OF_PARTS)}

    folder = writer.publish(tmp_path, "checkpoint-1", write)
    manifest.check(folder)
    assert content_of(folder / "file", OF_PARTS).sha256 == OF_PARTS
    assert has_digest(folder / "file", ["0" * 64, OF_PARTS])
    assert has_digest(folder / "file", [hashlib.sha256(WHOLE).hexdigest(), f"13:{'0' * 64}"])
    assert not has_digest(folder / "file", ["0" * 64, f"13:{'0' * 64}"])
    (tmp_path / "sent").mkdir()
    assert writer.write_file(tmp_path / "sent" / "file", PARTS, OF_PARTS).sha256 == OF_PARTS
    (folder / "file").write_bytes(WHOLE.upper())
    with pytest.raises(Damaged, match="file does not match its sha256"):
        manifest.check(folder)
