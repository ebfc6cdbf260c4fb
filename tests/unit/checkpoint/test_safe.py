"""Weight files are looked at before they are loaded; a pickle is not opened unless its reader asks for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from erniekit.checkpoint.safe import check_safetensors, read_json, refuse_pickle
from erniekit.errors import CheckpointError


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_sound_file_gives_its_header_with_places_in_the_file(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros((0, 4), np.int8), "c": np.float64(1.5)}
    save_file({k: np.asarray(v) for k, v in arrays.items()}, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = check_safetensors(tmp_path / "m.safetensors")
    assert header.metadata == {"format": "pt"}
    entry = header.tensors["b"]
    assert (entry.dtype, entry.shape) == ("F32", (2, 3))
    raw = (tmp_path / "m.safetensors").read_bytes()[entry.start : entry.end]
    assert raw == arrays["b"].tobytes()
    assert header.tensors["a"].shape == (0, 4)
    assert header.tensors["c"].shape == ()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": tensor(offsets=(0, 16), shape=(4,))}, b"8 bytes.", "end at byte"),
        ({"a": tensor()}, b"8 bytes.more", "end at byte"),
        ({"a": tensor(), "b": tensor(offsets=(4, 12))}, b"x" * 12, "overlaps"),
        ({"a": tensor(), "b": tensor(offsets=(12, 20))}, b"x" * 20, "hole"),
        ({"a": tensor(shape=(3,))}, b"8 bytes.", "need another number"),
        ({"a": tensor(shape=(2**40, 2**40))}, b"8 bytes.", "need another number"),
        ({"a": tensor(shape=[2**62] * 100_000)}, b"8 bytes.", "need another number"),
        ({"a": tensor(offsets=(8, 0))}, b"8 bytes.", "need another number"),
        ({"a": tensor(dtype="F31")}, b"8 bytes.", "unknown dtype"),
        ({"a": tensor(dtype=["F32"])}, b"8 bytes.", "unknown dtype"),  # type: ignore[arg-type]
        ({"a": tensor(shape=(2.0,))}, b"8 bytes.", "not sizes"),
        ({"a": tensor(shape=(True, 2))}, b"8 bytes.", "not sizes"),
        ({"a": tensor(shape=(-2,))}, b"8 bytes.", "not sizes"),
        ({"a": tensor(offsets=(0, 4, 8))}, b"8 bytes.", "not sizes"),
        ({"a": {"dtype": "F32"}}, b"", "lacks"),
        ({"a": 3}, b"", "lacks"),
        ({"__metadata__": {"a": 1}}, b"", "metadata"),
        (b'{"a": {"dtype":"F32","shape":[],"data_offsets":[0,4]},"a": {}}', b"abcd", "twice"),
        (b'{"a": NaN}', b"", "NaN"),
        (b'{"\\ud800": {"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"abcd", "surrogates"),
        (b'{"a": ' + b"[" * 200_000, b"", "safetensors"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "safetensors"),
        (b"\xff\xfe{}", b"", "not JSON"),
        (b"[]", b"", "not JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, message):
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_safetensors(path)
    assert "m.safetensors" in caught.value.what


@pytest.mark.parametrize("length", [3, 2**63, 2**64 - 1, 99_999_999])
def test_the_length_field_is_not_believed(tmp_path, length):
    path = write(tmp_path / "m.safetensors", {"a": tensor()}, b"8 bytes.", length)
    with pytest.raises(CheckpointError):
        check_safetensors(path)


def test_an_empty_a_missing_and_a_folder_are_said_so(tmp_path):
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in [("empty", "0 bytes"), ("nowhere", "is missing"), ("folder", "Is a directory")]:
        with pytest.raises(CheckpointError, match=message):
            check_safetensors(tmp_path / f"{name}.safetensors")


def test_a_pickle_is_refused_by_name_and_the_error_names_the_way_out(tmp_path):
    for name in ("pytorch_model.bin", "model.PT", "model_state.pdparams", "optimizer.pdopt", "scheduler.pkl"):
        with pytest.raises(CheckpointError, match="is a pickle") as caught:
            refuse_pickle(tmp_path / name)
        assert "safetensors" in caught.value.fix
    refuse_pickle(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a pickle"):
        check_safetensors(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 200_000])
def test_json_that_is_none_is_said_with_its_name(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json is not JSON"):
        read_json(tmp_path / "state.json")


def test_json_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "state.json").write_text('{"a": [1, 2.5, null]}')
    assert read_json(tmp_path / "state.json") == {"a": [1, 2.5, None]}
    with pytest.raises(CheckpointError, match="larger than 5 bytes"):
        read_json(tmp_path / "state.json", max_bytes=5)
    with pytest.raises(CheckpointError, match="missing"):
        read_json(tmp_path / "other.json")
