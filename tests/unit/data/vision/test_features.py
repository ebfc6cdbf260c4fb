"""Kept features of pictures: whole or absent, checked, bounded, and named after all their pixels follow from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from erniekit.data.media.decode import Medium
from erniekit.data.media.place import MediaPlace
from erniekit.data.vision.features import FeatureShape, FeatureStore, decoders, free_space, key_of

MEDIUM = Medium((MediaPlace("a.png"),), (1, 4, 6), digests=("aa",))
SHAPE = FeatureShape(8, torch.float32)


def store(folder: Path, room: int = 1 << 20, shape: FeatureShape = SHAPE) -> FeatureStore:
    return FeatureStore(folder / "tower", shape, room)


def features(rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))


def test_what_is_written_is_read_bit_for_bit_and_counted(tmp_path: Path) -> None:
    first = store(tmp_path)
    assert first.read(MEDIUM) is None
    assert first.write(MEDIUM, features())
    assert torch.equal(first.read(MEDIUM), features())
    assert first.counts() == {"feature_cache_hits": 1.0, "feature_cache_made": 1.0}
    assert first.counts() == {"feature_cache_hits": 0.0, "feature_cache_made": 0.0}


@pytest.mark.parametrize(
    "change",
    [
        {"digests": ("bb",)}, {"grid": (1, 6, 4)}, {"upright": False}, {"patch": 16}, {"video": True},
        {"frames": (0, 1)}, {"stamps": (0.5,)},
    ],
)  # fmt: skip
def test_every_choice_about_the_pixels_is_in_the_name_and_the_place_of_the_file_is_not(change: dict) -> None:
    assert key_of(replace(MEDIUM, **change)) != key_of(MEDIUM)
    assert key_of(replace(MEDIUM, places=(MediaPlace("b.png"),), origin="rows.jsonl:7")) == key_of(MEDIUM)


def test_another_release_of_a_decoder_gives_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    video = replace(MEDIUM, video=True, frames=(0, 1))
    before = key_of(MEDIUM), key_of(video)
    releases = {"pillow": version("pillow"), "av": "0.0.1"}
    monkeypatch.setattr("erniekit.data.vision.features.version", releases.__getitem__)
    decoders.cache_clear()
    try:
        assert key_of(MEDIUM) == before[0]
        assert key_of(video) != before[1]
    finally:
        decoders.cache_clear()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other shape"])
def test_a_damaged_file_is_noticed_removed_and_written_again(damage: str, tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.write(MEDIUM, features())
    path = kept.path(MEDIUM)
    raw = bytearray(path.read_bytes())
    if damage == "other shape":
        other = replace(MEDIUM, grid=(1, 2, 2))
        kept.write(other, features(4))
        raw = bytearray(kept.path(other).read_bytes())
    raw[-3] ^= damage == "flip"
    path.write_bytes(raw[:-9] if damage == "cut" else b"" if damage == "empty" else raw)
    assert kept.read(MEDIUM) is None
    assert kept.damaged == 1
    assert not path.exists()
    kept.write(MEDIUM, features())
    assert torch.equal(kept.read(MEDIUM), features())


def test_no_more_is_written_than_there_is_room_for(tmp_path: Path) -> None:
    small = store(tmp_path, room=SHAPE.bytes(MEDIUM.grid))
    assert small.write(MEDIUM, features())
    other = replace(MEDIUM, digests=("bb",))
    assert not small.write(other, features())
    assert small.read(other) is None
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= SHAPE.bytes(MEDIUM.grid)


KILLED = """
import os, signal, sys
from pathlib import Path
from erniekit.data.vision import features as module
sys.path.insert(0, sys.argv[2])
from test_features import MEDIUM, features, store
module.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store(Path(sys.argv[1])).write(MEDIUM, features())
"""


def test_a_kill_between_writing_and_renaming_leaves_no_entry_and_the_rest_is_cleared(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.tmp-*"))) == 1
    assert store(tmp_path).read(MEDIUM) is None
    free_space(tmp_path, 1 << 20, 0, "tower")
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_room_is_made_of_other_towers_oldest_files_alone(tmp_path: Path) -> None:
    old, own = FeatureStore(tmp_path / "old", SHAPE, 1 << 20), store(tmp_path)
    media = [replace(MEDIUM, digests=(name,)) for name in ("a", "b", "c")]
    for age, medium in enumerate(media):
        old.write(medium, features())
        os.utime(old.path(medium), (age, age))
    own.write(MEDIUM, features())
    size = own.path(MEDIUM).stat().st_size
    theirs = tmp_path / "old" / "ab" / "model.safetensors"
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_bytes(bytes(10 * size))
    os.utime(theirs, (0, 0))
    assert free_space(tmp_path, limit=4 * size, needed=size, keep="tower") == size
    assert theirs.exists()
    assert [old.read(medium) is not None for medium in media] == [False, True, True]
    assert own.read(MEDIUM) is not None


def test_tokens_of_pictures_and_videos_lie_in_as_many_rows_as_patches(tmp_path: Path) -> None:
    kept = store(tmp_path, shape=FeatureShape(8, torch.float32, tokens=True))
    for grid, tokens in (((1, 4, 6), 6), ((4, 4, 6), 12)):
        rows = kept.shape.laid_out(features(tokens), grid)
        assert rows.shape == (grid[0] * 24, 2)
        assert torch.equal(rows[: 4 * tokens].reshape(tokens, 8), features(tokens))
