"""Compressed moments: the error bounds the module promises, what is left alone, and any rank's part of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from erniekit.checkpoint import compress
from erniekit.checkpoint.compress import BLOCK, StoredState, compressed
from erniekit.checkpoint.shards import write_shards
from support.fake_sharding import random_sharding

STAGES = {"O1": (8, 127, 255), "O2": (4, 7, 15)}  # bits, levels of a sign, levels of a square


def moments(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As Adam's are: squares over twenty octaves within a row, some parameters never touched."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.empty(rows, columns).uniform_(-20, 0, generator=draw))
    m, v = size * torch.randn(rows, columns, generator=draw), size.square() * 1e-4
    untouched = torch.rand(rows, columns, generator=draw) < 0.05
    untouched[1] = True
    return m.masked_fill(untouched, 0.0), v.masked_fill(untouched, 0.0)


def through_disk(folder, tensors: dict[str, torch.Tensor], stage: str) -> StoredState:
    write_shards(folder, "optimizer", compressed(tensors.items(), stage))
    return StoredState(folder, "optimizer")


def per_block(tensor: torch.Tensor, how) -> torch.Tensor:
    """`how` of each block, spread over its elements again."""
    blocks = [how(block, -1, keepdim=True).expand_as(block) for block in tensor.split(BLOCK, dim=-1)]
    return torch.cat(blocks, dim=-1)


@pytest.mark.parametrize("columns", [128, 300, 40])
@pytest.mark.parametrize("stage", STAGES)
def test_the_next_update_stays_within_the_promised_error_and_keeps_its_sign(stage, columns, tmp_path):
    m, v = moments(9, columns)
    stored = through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, stage)
    root = stored["w/exp_avg_sq"].sqrt()
    before, after = (t.div(root).nan_to_num(0.0) for t in (m, stored["w/exp_avg"]))
    _, L, _ = STAGES[stage]
    bound = per_block(before.abs(), torch.amax) / (2 * L)
    assert bool(((after - before).abs() <= bound * (1 + 1e-5)).all())  # 1e-5: the arithmetic itself is fp32
    assert bool((stored["w/exp_avg"] * m >= 0).all())
    assert stored["w/exp_avg"][m == 0].abs().max() == 0


@pytest.mark.parametrize("columns", [128, 300, 40])
@pytest.mark.parametrize("stage", STAGES)
def test_second_moments_stay_within_the_promised_ratio_and_none_becomes_zero(stage, columns, tmp_path):
    m, v = moments(9, columns)
    got = through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, stage)["w/exp_avg_sq"]
    _, _, N = STAGES[stage]
    smallest = per_block(torch.where(v > 0, v, torch.inf), torch.amin)
    allowed = (per_block(v, torch.amax) / smallest) ** (1 / (2 * (N - 1)))
    there = v > 0
    ratio = torch.maximum(got / v, v / got)
    assert bool((ratio <= allowed * (1 + 1e-4))[there].all())  # 1e-4: a log2 of -40 has 5 digits behind the point
    assert torch.equal(got > 0, there)


@pytest.mark.parametrize(("stage", "limit"), [("O1", 0.02), ("O2", 0.4)])
def test_adams_next_updates_change_little(stage, limit, tmp_path):
    """Ten more steps from the stored moments and from the real ones. Limits are twice what this data gives."""
    m, v = moments(64, 512)
    stored = through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, stage)
    both = [(m, v), (stored["w/exp_avg"], stored["w/exp_avg_sq"])]
    draw = torch.Generator().manual_seed(1)
    for _ in range(10):
        g = torch.randn(m.shape, generator=draw) * v.sqrt()
        both = [(a * 0.9 + g * 0.1, b * 0.999 + g * g * 0.001) for a, b in both]
        before, after = (a / (b.sqrt() + 1e-8) for a, b in both)
        assert float((after - before).norm() / before.norm()) < limit


@pytest.mark.parametrize("stage", STAGES)
def test_compressing_again_changes_nothing_more(stage, tmp_path):
    m, v = moments(9, 300)
    once = dict(through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, stage))
    twice = dict(through_disk(tmp_path, once, stage))
    torch.testing.assert_close(twice["w/exp_avg"], once["w/exp_avg"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(twice["w/exp_avg_sq"], once["w/exp_avg_sq"], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("stage", "times"), [("O1", 3.75), ("O2", 7.1)])
def test_files_shrink_as_promised(stage, times, tmp_path):
    m, v = moments(256, 1024)
    for name, how in (("whole", "O0"), ("small", stage)):
        (tmp_path / name).mkdir()
        through_disk(tmp_path / name, {"w/exp_avg": m, "w/exp_avg_sq": v}, how)
    sizes = [(tmp_path / name / "optimizer.safetensors").stat().st_size for name in ("whole", "small")]
    assert sizes[0] / sizes[1] > times


def test_off_by_default_means_the_same_bits(tmp_path):
    m, v = moments(9, 300)
    stored = through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, "O0")
    assert not stored.is_compressed
    assert torch.equal(stored["w/exp_avg"], m)
    assert torch.equal(stored["w/exp_avg_sq"], v)
    assert sorted(stored) == ["w/exp_avg", "w/exp_avg_sq"]


def test_what_is_small_alone_or_not_finite_is_stored_as_it_is(tmp_path):
    pairs = {
        "norm": (torch.randn(300), torch.rand(300)),
        "lora.B": (torch.randn(300, 8), torch.rand(300, 8)),
        "bad": (torch.randn(4, 256), torch.full((4, 256), torch.inf)),
        "half": (torch.randn(4, 256).half(), torch.rand(4, 256).half()),
        "empty": (torch.zeros(0, 256), torch.zeros(0, 256)),
    }
    kept = {f"{n}/{key}": t for n, pair in pairs.items() for key, t in zip(("exp_avg", "exp_avg_sq"), pair)}
    kept |= {
        "alone/exp_avg": torch.randn(4, 256),
        "other/exp_avg_sq": torch.rand(4, 256),
        "last/exp_avg": torch.ones(4),
    }
    real = {"w/exp_avg": torch.randn(4, 256), "w/exp_avg_sq": torch.rand(4, 256)}
    stored = through_disk(tmp_path, {**real, **kept}, "O2")
    assert all(torch.equal(stored[name], tensor) for name, tensor in kept.items())
    assert stored.is_compressed
    assert set(stored) == {*kept, *real}


def test_moments_in_16_bit_are_stored_as_their_fp32_values_are(tmp_path):
    pair = {"w/exp_avg": torch.randn(4, 256).bfloat16(), "w/exp_avg_sq": torch.rand(4, 256).bfloat16()}
    folders = [tmp_path / "lean", tmp_path / "full"]
    for folder in folders:
        folder.mkdir()
    lean = through_disk(folders[0], pair, "O1")
    full = through_disk(folders[1], {name: tensor.float() for name, tensor in pair.items()}, "O1")
    assert lean.is_compressed
    assert all(torch.equal(lean[name], full[name]) for name in pair)


def test_rows_of_odd_length_are_stored_in_8_bit(tmp_path):
    m, v = torch.randn(4, 151), torch.rand(4, 151)
    stored = through_disk(tmp_path, {"w/exp_avg": m, "w/exp_avg_sq": v}, "O2")
    assert {"w/exp_avg@int8", "w/exp_avg_sq@int8"} < {*stored.files.files}
    torch.testing.assert_close(stored["w/exp_avg_sq"], v, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("stage", ["O0", "O1", "O2"])
def test_every_ranks_part_is_that_part_of_the_whole(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(compress, "CHUNK", 3000)  # a few rows at a time
    shapes = {"p0": (17, 300), "p1": (300,), "p2": (33, 130), "p3": (6, 256), "p4": (40, 512)}
    tensors = {f"{n}/{key}": torch.rand(s) for n, s in shapes.items() for key in ("exp_avg", "exp_avg_sq")}
    whole = dict(through_disk(tmp_path, tensors, stage))
    for seed, ranks in itertools.product(range(5), (1, 2, 4)):
        sharding = random_sharding(shapes, ranks, seed)
        for rank in range(ranks):
            part = StoredState(tmp_path, "optimizer", sharding, rank)
            for name in tensors:
                expected = sharding.local(name.partition("/")[0], rank, whole[name])
                assert torch.equal(part[name], expected), (name, rank, seed)


def test_a_rank_reads_little_more_than_its_part(tmp_path):
    through_disk(tmp_path, {"p/exp_avg": torch.rand(64, 1024), "p/exp_avg_sq": torch.rand(64, 1024)}, "O1")
    sharding = random_sharding({"p": (64, 1024)}, 4, 0)
    boxes = [sharding.boxes("p", rank) for rank in range(4)]
    for rank in range(4):
        part = StoredState(tmp_path, "optimizer", sharding, rank)
        held = part["p/exp_avg_sq"].numel()
        rows = sum(b.global_slices[0].stop - b.global_slices[0].start for b in boxes[rank])
        # a byte each, at most two blocks of 128 more in each row, and their scales
        assert held <= part.files.bytes_read <= held * (1 + 8 / BLOCK) + rows * (2 * BLOCK + 16)


def test_an_absent_moment_is_absent(tmp_path):
    stored = through_disk(tmp_path, {"w/exp_avg": torch.rand(4, 64), "w/exp_avg_sq": torch.rand(4, 64)}, "O1")
    assert "v/exp_avg" not in stored
    with pytest.raises(KeyError):
        stored["v/exp_avg"]
    assert len(StoredState(tmp_path, "master_weights")) == 0
