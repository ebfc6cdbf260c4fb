"""The manifest catches every change of a published folder, and says which file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manifest import MANIFEST, Damaged, FileRecord, Manifest
from erniekit.errors import CheckpointError
from erniekit.files.walk import foreign_files


def make(folder: Path, files: dict[str, bytes], info: dict | None = None) -> Manifest:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    made = Manifest({name: manifest.measure(folder / name) for name in files}, info or {})
    (folder / MANIFEST).write_bytes(made.to_bytes())
    return made


def sealed(head: bytes) -> bytes:
    return head + b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def test_a_manifest_survives_the_trip_to_disk(tmp_path):
    made = make(
        tmp_path, {"a.bin": b"x" * 10, "deep/er/b.json": b"{}"}, {"step": 3, "note": "über", "deep": {"a": [1, 2.5]}}
    )
    assert manifest.check(tmp_path) == made
    assert made.total_bytes == 12


def test_a_flipped_bit_in_any_byte_of_the_manifest_is_found(tmp_path):
    make(tmp_path, {"a": b"1", "b": b"22"}, {"step": 3})
    whole = (tmp_path / MANIFEST).read_bytes()
    for i in range(len(whole)):
        (tmp_path / MANIFEST).write_bytes(whole[:i] + bytes([whole[i] ^ 1 << (i % 8)]) + whole[i + 1 :])
        with pytest.raises(Damaged, match=r"MANIFEST\.json"):
            manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b"y" * 100), "does not match its sha256"),
        (lambda p: p.write_bytes(b"x" * 99), "has 99 bytes, 100 were saved"),
        (lambda p: p.unlink(), "is missing"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/null")), "is not a plain file"),
        (lambda p: (p.unlink(), p.mkdir()), "is not a plain file"),
    ],
)
def test_the_damaged_file_is_named(tmp_path, damage, message):
    make(tmp_path, {"good": b"1", "sub/model.safetensors": b"x" * 100})
    damage(tmp_path / "sub/model.safetensors")
    with pytest.raises(Damaged, match=message) as caught:
        manifest.check(tmp_path)
    assert "model.safetensors" in caught.value.what
    assert caught.value.where == str(tmp_path / "sub/model.safetensors")


def test_a_check_by_size_does_not_read_the_files(tmp_path):
    make(tmp_path, {"a": b"abc"})
    (tmp_path / "a").write_bytes(b"xyz")
    manifest.check(tmp_path, "size")
    with pytest.raises(Damaged):
        manifest.check(tmp_path, "full")


def test_a_sampled_check_sees_both_ends_of_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "SAMPLED_ABOVE", 1 << 20)
    content = bytearray(8 << 20)
    make(tmp_path, {"big": bytes(content), "small": b"1"})
    manifest.check(tmp_path, "sample")
    for at in (0, len(content) // 3 // 65536 * 65536, len(content) - 1):
        changed = content[:]
        changed[at : at + 200_000] = b"\1" * len(changed[at : at + 200_000])  # longer than the gap of 69 KB
        (tmp_path / "big").write_bytes(changed)
        with pytest.raises(Damaged, match="big does not match"):
            manifest.check(tmp_path, "sample")
    (tmp_path / "big").write_bytes(content)
    (tmp_path / "small").write_bytes(b"2")
    with pytest.raises(Damaged, match="small does not match"):
        manifest.check(tmp_path, "sample")


def test_a_newer_format_is_refused_but_is_no_damage(tmp_path):
    text = Manifest({"a": FileRecord(1, "0" * 64)}, {}).to_bytes().replace(b'"format": 1', b'"format": 2')
    (tmp_path / MANIFEST).write_bytes(sealed(text[: text.index(b',\n "sha256": "', text.index(b'"info"'))]))
    with pytest.raises(CheckpointError, match="format 2") as caught:
        manifest.load(tmp_path)
    assert not isinstance(caught.value, Damaged)


@pytest.mark.parametrize(
    "head",
    [
        b'{\n "format": 1,\n "files": {"../../etc/passwd": {"size": 1, "sha256": "0"}},\n "info": {}',
        b'{\n "format": 1,\n "files": {"/etc/passwd": {"size": 1, "sha256": "0"}},\n "info": {}',
        b'{\n "format": 1,\n "files": {"a": {"size": "1", "sha256": "0"}},\n "info": {}',
        b'{\n "format": 1,\n "files": {"a": {"rows": 1}},\n "info": {}',
        b'{\n "format": 1,\n "files": [],\n "info": {}',
        b'{\n "format": 1,\n "info": {}',
        b'{\n "format": 1,\n "files": ' + b"[" * 100_000 + b',\n "info": {}',
    ],
)
def test_a_manifest_made_by_hand_cannot_lead_out_of_its_folder_or_crash_us(tmp_path, head):
    (tmp_path / MANIFEST).write_bytes(sealed(head))
    with pytest.raises(Damaged, match=r"MANIFEST\.json"):
        manifest.load(tmp_path)


GOOD = {"size": 10, "sha256": hashlib.sha256(b"x" * 10).hexdigest()}


@pytest.mark.parametrize(
    ("name", "entry", "wrong"),
    [
        ("w\0.safetensors", GOOD, "name"),
        ("w\ud800.safetensors", GOOD, "name"),
        ("w" * 300, GOOD, "name"),
        ("w/" * 2000 + "w", GOOD, "name"),
        ("", GOOD, "name"),
        ("w", {**GOOD, "size": -1}, "size"),
        ("w", {**GOOD, "size": True}, "size"),
        ("w", {**GOOD, "size": 10.0}, "size"),
        ("w", {**GOOD, "size": None}, "size"),
        *(("w", {**GOOD, "sha256": value}, "sha256") for value in (None, 7, [], {}, "", "0", GOOD["sha256"].upper())),
        *(("w", {**GOOD, "sha256": form + GOOD["sha256"]}, "sha256") for form in (":", "0:", "3+:", "-1:", "a:", "٣:")),
        *(("w", {**GOOD, "sample": value}, "sample") for value in (None, 7, [], "0", f"10:{GOOD['sha256']}")),
    ],
)
def test_an_entry_that_no_writer_gives_is_damage(tmp_path, name, entry, wrong):
    head = json.dumps({"format": 1, "files": {name: entry}, "info": {}}, indent=1).removesuffix("\n}").encode()
    with pytest.raises(ValueError, match=f"has an entry .* with an invalid {wrong}"):
        Manifest.from_bytes(sealed(head))
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "w").write_bytes(b"x" * 10)
    (folder / MANIFEST).write_bytes(sealed(head))
    with pytest.raises(Damaged, match=r"MANIFEST\.json has an entry"):
        manifest.check(folder)
    assert {*foreign_files(folder)} <= {folder / "w", folder / MANIFEST}  # and no traceback


@pytest.mark.parametrize("digest", ["ab" * 32, "10:" + "ab" * 32, "1024+4096:" + "ab" * 32])
def test_both_forms_of_a_digest_are_read_again(digest):
    made = Manifest({"w": FileRecord(10, digest, "cd" * 32)}, {})
    assert Manifest.from_bytes(made.to_bytes()) == made


def test_a_folder_that_is_not_there_is_not_called_damaged(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint folder") as caught:
        manifest.load(tmp_path / "nowhere")
    assert not isinstance(caught.value, Damaged)
