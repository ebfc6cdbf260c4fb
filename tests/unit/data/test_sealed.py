"""Cache folders: synced before they get their name, and any changed byte is seen before they are used."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from erniekit.data import sealed


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "a.npy").write_bytes(bytes(range(256)) * 40)
    (folder / "b.npy").write_bytes(b"short")
    sealed.seal(folder)
    return folder


def test_a_sealed_folder_is_whole_until_a_byte_changes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert sealed.is_sealed(folder)
    for damage in (b"", bytes(10240), bytes(range(256)) * 39 + bytes(255) + b"!"):
        (folder / "a.npy").write_bytes(damage)
        assert not sealed.is_sealed(folder), "cut, zeroed, or one byte of it"
    (folder / "a.npy").write_bytes(bytes(range(256)) * 40)
    assert sealed.is_sealed(folder)
    (folder / "b.npy").unlink()
    assert not sealed.is_sealed(folder)


@pytest.mark.parametrize("seal", ["", "{}", '{"files": {}}', '{"files": 3}', '{"files": {"b.npy": 5}}'])
def test_a_broken_seal_seals_nothing(tmp_path: Path, seal: str) -> None:
    folder = folder_of(tmp_path)
    (folder / sealed.SEAL).write_text(seal)
    assert not sealed.is_sealed(folder)


def test_every_file_is_on_disk_before_the_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (happened.append(os.readlink(f"/proc/self/fd/{fd}")), plain(fd))[1])
    folder = folder_of(tmp_path)
    renamed = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (happened.append("rename"), renamed(self, to))[1])
    sealed.publish(folder, tmp_path / "final")
    at = happened.index("rename")
    assert {Path(p).name for p in happened[:at]} == {"a.npy", "b.npy", sealed.SEAL, "made"}
    assert [Path(p).name for p in happened[at + 1 :]] == [tmp_path.name]


def test_a_large_file_is_known_by_blocks_from_its_first_byte_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "SAMPLES", 5)
    monkeypatch.setattr(sealed, "BLOCK", 16)

    def digest(content: bytes) -> str:
        (tmp_path / "file").write_bytes(content)
        out = hashlib.sha256()
        with open(tmp_path / "file", "rb") as file:
            sealed.add_content(out, file.fileno(), 0, len(content), whole=512)
        return out.hexdigest()

    plain = bytes(1000)
    for start in [984 * k // 4 for k in range(5)]:
        for at in (start, start + 15):
            assert digest(plain[:at] + b"!" + plain[at + 1 :]) != digest(plain), at
    assert digest(plain[:100] + b"!" + plain[101:]) == digest(plain), "between two blocks: not covered"
    assert digest(bytes(1001)) != digest(plain)


def test_a_damaged_folder_makes_room_and_files_of_others_stay(tmp_path: Path, capsys) -> None:
    folder, names = folder_of(tmp_path), ("a.npy", "b.npy", sealed.SEAL)
    sealed.clear(folder, names)
    assert not folder.exists()
    folder = folder_of(tmp_path)
    (folder / "notes.txt").write_text("theirs")
    sealed.clear(folder, names)
    assert not folder.exists()
    (kept,) = tmp_path.glob("made.not-ours-*/*")
    assert kept.read_text() == "theirs"
    assert "no part of the cache" in capsys.readouterr().err
    folder.symlink_to(kept.parent)
    with pytest.raises(OSError, match="link"):
        sealed.clear(folder, ["notes.txt"])
    assert kept.exists()
