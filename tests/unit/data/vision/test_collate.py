"""Packs with pictures: batches, exact bounds, the packs ERNIEKit made, and what happens when a file is gone."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream, fill_both, fill_in_order
from erniekit.data.types import IGNORE, Batch, Pack
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.compat_packs import JoinedFlags, lengths_like_erniekit, like_erniekit
from erniekit.data.vision.job import VisionSource, open_vision_source
from erniekit.data.vision.rules import VisionTokens
from support.seen import FOLDER, LIMITS, MEDIA, patches, recorded, rules, sha, tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> VisionSource:
    folder = tmp_path_factory.mktemp("rows")
    shutil.copytree(MEDIA, folder / "media")
    shutil.copy(FOLDER / "rows.jsonl", folder)
    options = dict(max_seq_len=256, cache_dir=folder / "cache", num_proc=1, max_bad_fraction=1.0)
    return open_vision_source(folder / "rows.jsonl", None, tokenizer(), rules(), **options)


@pytest.fixture
def collate():
    made = VisionCollate(VisionTokens.of(tokenizer()), LIMITS, 2)
    yield made
    made.close()


def of_lossy_video(rows: list[int]) -> bool:
    return bool({"video_mpeg4", "video_max_clamp", "too_long_video"} & {recorded()["rows"][i]["name"] for i in rows})


def test_packs_under_compat_are_the_recorded_ones(source: VisionSource) -> None:
    packs: dict[int, list[int]] = defaultdict(list)
    for i, pack in enumerate(fill_in_order(lengths_like_erniekit([source.lengths])[0].tolist(), 256)):
        packs[pack].append(i)
    flags: dict[float, JoinedFlags] = {}
    number: dict[float, int] = defaultdict(int)
    made = VisionCollate(VisionTokens.of(tokenizer()), LIMITS, 2, zero_padding=True)
    try:
        for told in recorded()["packs"]:
            share = told["multiround_ratio"]
            n = number[share]
            number[share] += 1
            drawn = flags.setdefault(share, JoinedFlags(share))
            assert [source.row(i) - 1 for i in packs[n]] == told["rows"]
            assert drawn[n] == told["pseudo_multiround"]
            pack = like_erniekit(Pack(tuple(source.sample(i) for i in packs[n]), n), n, drawn, tokenizer().end_id)
            batch = made([pack], pad_to=256, pad_id=0)
            assert batch.input_ids[0].tolist() == told["input_ids"]
            assert batch.labels[0].tolist() == told["labels"]
            assert batch.positions[0].tolist() == told["position_ids"]
            assert batch.modality[0].tolist() == told["token_type_ids"][:-1]
            assert batch.vision.grids.tolist() == told["grid_thw"]
            assert batch.num_tokens == told["real_tokens"]
            assert batch.cu_seqlens.tolist()[:-2] == told["pack_offsets"][:-1]  # here padding is apart
            if not of_lossy_video(told["rows"]):
                assert sha(batch.vision.patches.numpy()) == told["patches_sha"]
    finally:
        made.close()
    assert number == {0.3: 7, 0.0: 7, 1.0: 7}


def test_a_batch_has_its_samples_pixels_in_their_places(source: VisionSource, collate: VisionCollate) -> None:
    packs = [Pack((source.sample(0), source.sample(3)), 0), Pack((source.sample(16),), 1)]
    batch = collate(packs)
    assert batch.positions.shape == (*batch.input_ids.shape, 3)
    assert batch.modality.shape == batch.input_ids.shape
    samples = [sample for pack in packs for sample in pack.samples]
    assert np.array_equal(batch.vision.patches.numpy(), patches(tuple(m for s in samples for m in s.media.sources)))
    assert batch.vision.grids.tolist() == [grid for s in samples for grid in s.media.grids.tolist()]
    place = VisionTokens.of(tokenizer()).placeholder
    assert batch.vision.places.tolist() == torch.nonzero(batch.input_ids.flatten() == place)[:, 0].tolist()
    merged = [t // 2 * h * w // 4 if t > 1 else h * w // 4 for t, h, w in batch.vision.grids.tolist()]
    assert sum(merged) == len(batch.vision.places)
    second = len(samples[0].ids)
    assert batch.positions[0, second].tolist() == [0, 0, 0]  # positions restart
    assert batch.cu_seqlens.tolist()[:2] == [0, second]


def test_text_alone_has_no_vision_and_three_equal_positions(source: VisionSource, collate: VisionCollate) -> None:
    from dataclasses import replace

    plain = replace(source.sample(0), media=None)
    batch = collate([Pack((plain,), 0)])
    assert batch.vision is None
    assert batch.modality is None
    assert (batch.positions == batch.positions[..., :1]).all()


def test_a_file_that_is_gone_leaves_its_sample_blank_and_untrained_and_is_told(
    source: VisionSource, collate: VisionCollate, tmp_path: Path
) -> None:
    from dataclasses import replace

    sample = source.sample(0)
    [medium] = sample.media.sources
    gone = replace(medium, places=(replace(medium.places[0], path=str(tmp_path / "gone.png")),))
    broken = replace(sample, media=replace(sample.media, sources=(gone,)))
    batch, whole = (collate([Pack((first, source.sample(1)), 0)]) for first in (broken, sample))
    count = len(sample.ids)
    assert (batch.labels[0, :count] == IGNORE).all()
    assert torch.equal(batch.labels[0, count:], whole.labels[0, count:])
    assert batch.vision.patches[:36].sum() == 0
    assert torch.equal(batch.vision.patches[36:], whole.vision.patches[36:])
    assert batch.num_label_tokens == int((batch.labels != IGNORE).sum()) > 0
    assert [(problem.line, problem.kind) for problem in collate.failed] == [(1, "missing_media")]
    assert collate.failed[0].file == source.path


def test_no_pack_has_more_patches_than_its_budget_unless_one_sample_has() -> None:
    lengths, costs = [10, 20, 30, 40, 10], [100, 50, 60, 300, 10]
    for greedy in (True, False):
        bins = fill_both(lengths, 100, costs, 200, greedy)
        for b in set(bins):
            members = [i for i, bin_ in enumerate(bins) if bin_ == b]
            assert sum(lengths[i] for i in members) <= 100
            assert sum(costs[i] for i in members) <= 200 or len(members) == 1
    assert fill_both(lengths, 100, costs, 200, False) == [0, 0, 1, 2, 3]
    assert fill_both(lengths, 100, costs, 10**9, False) == fill_in_order(lengths, 100)


def steps(source: VisionSource, collate: VisionCollate, start: int, count: int, workers: int) -> list[list[Batch]]:
    order = SampleOrder([len(source)], [1.0], seed=3, shuffle=True)
    stream = PackStream(order, [source.lengths], 256, costs=[source.patches], max_cost=200)
    loader = BatchLoader(stream, [source], 1, 2, start_pack=start, num_workers=workers, collate=collate)
    out = []
    for step in loader:
        out.append(step)
        if len(out) == count:
            break
    loader.close()
    return out


def test_a_resumed_loader_gives_the_same_pixels_whatever_the_number_of_workers(
    source: VisionSource, collate: VisionCollate
) -> None:
    whole = steps(source, collate, 0, 6, 0)
    later = steps(source, collate, 2 * 3, 3, 2)
    for first, second in zip(whole[3:], later):
        for a, b in zip(first, second):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.positions, b.positions)
            assert torch.equal(a.vision.patches, b.vision.patches)
            assert a.vision.patches.shape[0] <= 200


def test_a_rank_that_does_not_look_knows_that_there_are_pictures(source: VisionSource, collate: VisionCollate) -> None:
    """Later stages of a pipeline: whatever is decided by whether a batch shows something is decided alike."""
    blind = VisionCollate(VisionTokens.of(tokenizer()), LIMITS, 1, decode=False)
    try:
        packs = [Pack((source.sample(0),))]
        with_eyes, without = collate(packs), blind(packs)
    finally:
        blind.close()
    assert len(with_eyes.vision.patches) > 0
    assert without.vision is not None
    assert len(without.vision.patches) == len(without.vision.grids) == len(without.vision.places) == 0
    assert torch.equal(with_eyes.modality, without.modality)
    assert torch.equal(with_eyes.positions, without.positions)
