"""Damaged, forged and hostile checkpoint files: found, named, never executed, never used."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manager import CheckpointManager
from erniekit.checkpoint.manifest import MANIFEST
from erniekit.checkpoint.safe import SafetensorsHeader, check_safetensors, read_json, refuse_pickle
from erniekit.errors import CheckpointError
from faults.results import fault
from support.clock import within

SEED = int(os.environ.get("FAULT_SEED", time.time_ns() % 1_000_000))


def weights(step: int):
    def write(folder: Path) -> None:
        noise = np.random.default_rng(step)
        for i in (1, 2):  # shards of one size: only their content tells them apart
            shard = {f"layer.{i}.weight": noise.standard_normal((64, 64), np.float32)}
            save_file(shard, folder / f"model-0000{i}-of-00002.safetensors")
        save_file({"0.exp_avg": noise.standard_normal(4096, np.float32)}, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": step, "seed": list(range(300))}))

    return write


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with CheckpointManager(folder) as manager:
        manager.save(1, weights(1))
        manager.save(2, weights(2))
    return folder


def flip_a_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_short(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def zero_a_block(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(data) - 512))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def append_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def take_from_the_checkpoint_before(path: Path, rng: random.Random) -> None:
    shutil.copy(path.parent.with_name("checkpoint-1") / path.name, path)


def swap_the_shards(path: Path, rng: random.Random) -> None:
    other = path.with_name("model-00002-of-00002.safetensors")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def edit_the_manifest(path: Path, rng: random.Random) -> None:
    text = path.read_text()
    old, new = rng.choice([('"step": 2', '"step": 9'), ('"size": ', '"size": 1'), ('"sha256": "', '"sha256": "0')])
    path.write_text(text.replace(old, new, 1))


def all_damages(folder: Path, rounds: int) -> Iterator[tuple[str, Callable]]:
    every = (flip_a_bit, cut_short, zero_a_block, append_bytes, remove)
    for _ in range(rounds):
        for name in sorted(path.name for path in folder.iterdir()):
            yield from ((name, damage) for damage in every)
            if name != MANIFEST:  # the other manifest would be wrong about every other file: named is the first
                yield name, take_from_the_checkpoint_before
        yield "model-00001-of-00002.safetensors", swap_the_shards
        yield MANIFEST, edit_the_manifest


def damage_everything(saved: Path, tmp_path: Path, capsys, rounds: int) -> int:
    rng, cases = random.Random(SEED), 0
    for name, damage in all_damages(saved / "checkpoint-2", rounds):
        folder = shutil.copytree(saved, tmp_path / "out")
        broken = folder / "checkpoint-2"
        before = _content(broken)
        damage(broken / name, rng)
        story = f"FAULT_SEED={SEED} case {cases}: {damage.__name__} of {name}"
        assert _content(broken) != before, f"{story}: the fault did not happen"
        with CheckpointManager(folder) as manager:
            with pytest.raises(CheckpointError) as caught:
                manager.verify(broken)
            assert name in caught.value.what, story
            assert manager.latest_good() == folder / "checkpoint-1", story
        said = capsys.readouterr().err
        assert name in said, story
        if name == MANIFEST and damage is remove:  # it could be another program's: passed over and left alone
            assert "checkpoint-2 is passed over" in said, story
            assert _content(broken) == {k: v for k, v in before.items() if k != MANIFEST}, story
        else:
            assert "checkpoint-2 is damaged" in said, story
            assert (folder / "checkpoint-2.corrupt-1").is_dir(), story
        assert _content(folder / "checkpoint-1") == _content(saved / "checkpoint-1"), story
        shutil.rmtree(folder)
        cases += 1
    return cases


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_kind_of_damage_to_every_file_is_found_and_the_checkpoint_before_is_used(saved, tmp_path, capsys):
    with fault("C1", "every kind of damage to every file, twice") as row:
        row.count = row.hits = damage_everything(saved, tmp_path, capsys, rounds=2)
        row.lost, row.note = 0, "all found, the file named, the checkpoint before used"
        assert row.count >= 60


@pytest.mark.full
def test_a_thousand_damages_are_all_found(saved, tmp_path, capsys):
    with fault("C1", "every kind of damage to every file, 33 times") as row:
        row.count = row.hits = damage_everything(saved, tmp_path, capsys, rounds=33)
        row.lost, row.note = 0, "all found, the file named, the checkpoint before used"
        assert row.count >= 1000


def sound_file() -> bytes:
    arrays = {
        "embed.weight": np.ones((7, 5), np.float32),
        "layers.0.norm.weight": np.ones(5, np.float16),
        "empty": np.zeros((0, 3), np.int64),
        "scalar": np.array(2.0),
    }
    return save(arrays, metadata={"format": "pt", "note": "a b"})


def mutations(rng: random.Random, count: int) -> Iterator[bytes]:
    """Half of them at the level of bytes, half at the level of the header's values, which a random byte rarely hits."""
    whole = sound_file()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    odd = [-1, 0, 1, 2**31, 2**63 - 1, 2**64, 10**400, 1.5, True, None, "8", [], {}, "NaN"]
    for i in range(count):
        if i % 2:
            changed = bytearray(whole)
            for _ in range(rng.choice([1, 1, 2, 8])):
                changed[rng.randrange(8 + length)] = rng.randrange(256)
            if rng.random() < 0.3:
                del changed[rng.randrange(len(changed)) :]
            yield bytes(changed)
            continue
        edited = json.loads(json.dumps(header))
        name = rng.choice([key for key in edited if key != "__metadata__"])
        field = rng.choice(["dtype", "shape", "data_offsets", "entry", "metadata", "twin", "depth", "name"])
        if field == "dtype":
            edited[name][field] = rng.choice(["F64", "F32", "BF16", "F8_E4M3", "F4", "Q9", 3, None])
        elif field in ("shape", "data_offsets"):
            values = edited[name][field] or [1]
            values[rng.randrange(len(values))] = rng.choice([*odd, rng.randrange(200)])
            edited[name][field] = values
        elif field == "entry":
            edited[name] = rng.choice(odd)
        elif field == "metadata":
            edited["__metadata__"] = rng.choice([*odd, {"a": 1}, {"a": None}])
        elif field == "name":
            edited[rng.choice(["\ud800", "", "\0", "a" * 10_000])] = edited.pop(name)
        raw = json.dumps(edited).encode()
        if field == "twin":
            raw = raw[:-1] + b", " + json.dumps(name).encode() + b": " + json.dumps(edited[name]).encode() + b"}"
        elif field == "depth":
            raw = b'{"a": ' * rng.choice([10, 1000, 100_000]) + raw
        yield struct.pack("<Q", len(raw) + rng.choice([0, 0, 0, 1, -1, 10**6])) + raw + data


def header_or_none(path: Path) -> SafetensorsHeader | None:
    """None for a clean refusal; any other error than ours goes up and fails the test."""
    try:
        return check_safetensors(path)
    except CheckpointError:
        return None


def fuzz(tmp_path: Path, count: int) -> tuple[int, int]:
    """(refused, accepted); whatever we accept, the library must load without a word."""
    rng, path, refused, accepted = random.Random(SEED), tmp_path / "model.safetensors", 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i, content in enumerate(mutations(rng, count)):
        path.write_bytes(content)
        began = time.process_time()
        header = header_or_none(path)
        if header is None:
            refused += 1
        else:
            with safe_open(path, "numpy") as file:
                assert set(file.keys()) == set(header.tensors), f"FAULT_SEED={SEED} case {i}"
                for name, entry in header.tensors.items():
                    assert tuple(file.get_slice(name).get_shape()) == entry.shape
            accepted += 1
        assert within(time.process_time() - began, 1), f"FAULT_SEED={SEED} case {i}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1 << 20  # KiB: 1 GiB
    return refused, accepted


def test_two_hundred_forged_headers_end_in_clean_errors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(sound_file())
    assert len(check_safetensors(tmp_path / "model.safetensors").tensors) == 4
    refused, accepted = fuzz(tmp_path, 200)
    assert refused + accepted == 200
    assert refused >= 120  # the others changed a letter of a name, or nothing that matters


@pytest.mark.full
def test_five_thousand_forged_headers_end_in_clean_errors(tmp_path):
    refused, accepted = fuzz(tmp_path, 5000)
    assert refused + accepted == 5000


class Payload:
    """Creates the canary when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


def test_a_payload_in_a_weight_file_never_runs(tmp_path):
    torch = pytest.importorskip("torch")
    canary = tmp_path / "canary"
    plain = pickle.dumps({"w": Payload(canary)})
    pickle.loads(plain)
    assert canary.exists()  # it would work
    canary.unlink()
    attempts = 0
    for name in ("pytorch_model.bin", "model.pt", "model_state.pdparams", "optimizer.pdopt", "scheduler.pkl"):
        for archive in (False, True):
            path = tmp_path / name
            path.write_bytes(plain)
            if archive:
                torch.save({"w": Payload(canary)}, path)
                canary.unlink(missing_ok=True)
            for load in (refuse_pickle, check_safetensors):
                began = time.process_time()
                with pytest.raises(CheckpointError, match=name):
                    load(path)
                assert within(time.process_time() - began, 1)
                attempts += 1
    for name, load in [("model.safetensors", check_safetensors), ("state.json", read_json), (MANIFEST, None)]:
        (tmp_path / name).write_bytes(plain)
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name) if load else manifest.load(tmp_path)
        attempts += 1
    assert attempts == 23
    assert not canary.exists()
