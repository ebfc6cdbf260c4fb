"""Where media are found: files, data URLs, base64, archives that are never unpacked."""

from __future__ import annotations

import base64
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace, from_base64, located, read
from erniekit.files.media_folders import FOLDERS_VARIABLE
from support.seen import LIMITS, MEDIA

PICTURE = (MEDIA / "a.png").read_bytes()


def test_a_relative_path_starts_at_the_dataset_and_a_file_url_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a b.png").write_bytes(PICTURE)
    of_file = (f"file://{tmp_path}/a%20b.png", f"FILE://localhost{tmp_path}/a%20b.png")
    for url in ("a b.png", *of_file, str(tmp_path / "a b.png")):
        found = located(url, tmp_path)
        assert isinstance(found, MediaPlace)
        assert read(found, LIMITS) == PICTURE


def test_a_file_url_of_another_machine_is_not_a_file_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    with pytest.raises(MediaError, match=r"names another machine \(store\)"):
        located(f"file://store{tmp_path}/a.png", tmp_path)


def test_the_scheme_of_a_data_url_may_be_in_capitals(tmp_path: Path) -> None:
    assert located("DATA:image/png;base64," + base64.b64encode(PICTURE).decode(), tmp_path) == PICTURE


def test_a_job_of_the_web_page_reads_pictures_of_its_folders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a row names one that lies elsewhere: as a path, above, by a link, in an archive."""
    root = tmp_path / "root"
    root.mkdir()
    for folder in (root, tmp_path):
        (folder / "a.png").write_bytes(PICTURE)
        with zipfile.ZipFile(folder / "b.zip", "w") as archive:
            archive.write(MEDIA / "a.png", "a.png")
    (root / "link.png").symlink_to(tmp_path / "a.png")
    outside = (str(tmp_path / "a.png"), "../a.png", "link.png", f"file://{tmp_path}/a.png", "../b.zip/a.png")
    places = {url: located(url, root) for url in ("a.png", "b.zip/a.png", *outside)}
    for place in places.values():
        assert isinstance(place, MediaPlace)
        assert read(place, LIMITS) == PICTURE, "on the command line there is no such limit"
    monkeypatch.setenv(FOLDERS_VARIABLE, os.pathsep.join([str(tmp_path / "other"), str(root)]))
    for url, place in places.items():
        assert isinstance(place, MediaPlace)
        if url not in outside:
            assert read(place, LIMITS) == PICTURE
            continue
        with pytest.raises(MediaError, match="outside the folders"):
            read(place, LIMITS)
    kept = MediaPlace(str(tmp_path / "a.png"), size=len(PICTURE))  # as the cache keeps what a row holds itself
    assert read(kept, LIMITS) == PICTURE


def test_a_data_url_and_base64_hold_the_bytes_themselves(tmp_path: Path) -> None:
    text = base64.b64encode(PICTURE).decode()
    assert located(f"data:image/png;base64,{text}", tmp_path) == PICTURE
    assert from_base64(text) == PICTURE
    assert located(text, tmp_path, base64_too=True) == PICTURE
    with pytest.raises(MediaError, match="comma"):
        located("data:image/png;base64", tmp_path)
    with pytest.raises(MediaError) as bad:
        from_base64("no base64!")
    assert bad.value.kind == "bad_base64"


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_member_of_an_archive_is_read_in_place(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"shard.{kind}"
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            archive.add(MEDIA / "a.png", "deep/a.png")
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(MEDIA / "a.png", "deep/a.png")
    before = set(tmp_path.iterdir())
    found = located(f"shard.{kind}/deep/a.png", tmp_path)
    assert isinstance(found, MediaPlace)
    assert read(found, LIMITS) == PICTURE
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(MediaError, match="no such member"):
        read(located(f"shard.{kind}/deep/b.png", tmp_path), LIMITS)
    with pytest.raises(MediaError, match="media_max_bytes"):
        read(found, MediaLimits(bytes=100))


def test_a_member_that_unpacks_to_more_than_allowed_is_refused_before_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(50 << 20))
    assert (tmp_path / "bomb.zip").stat().st_size < 100_000
    with pytest.raises(MediaError, match="media_max_bytes"):
        read(located("bomb.zip/a.png", tmp_path), MediaLimits(bytes=1 << 20))


def test_what_is_no_file_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="nothing is downloaded"):
        located("https://example.org/a.png", tmp_path)
    with pytest.raises(MediaError, match="unpack it"):
        read(located("shard.tar.gz/a.png", tmp_path), LIMITS)
    with pytest.raises(MediaError, match="No such file"):
        read(located("none.png", tmp_path), LIMITS)
    with pytest.raises(MediaError, match="null byte"):
        read(located("a\0.png", tmp_path), LIMITS)
    for name in ("pipe.png", "pipe.zip"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(MediaError, match="not a plain file"):
            read(located(name if name.endswith("png") else f"{name}/a.png", tmp_path), LIMITS)


def test_a_place_survives_json() -> None:
    for place in (MediaPlace("/a/b.png"), MediaPlace("x.tar", "m.png"), MediaPlace("", "", 7, 9, "image_info[0]")):
        assert MediaPlace.from_json(place.to_json()) == place
