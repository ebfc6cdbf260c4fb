"""Synthetic steps: the shapes a workload asks for, and the same tokens for peers as for us."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from erniekit.bench.data import PictureIds, document_lengths, make_steps
from erniekit.bench.workloads import WORKLOADS, Rows, tiny
from erniekit.data.types import IGNORE


def test_documents_fill_a_row_and_are_about_as_long_as_asked() -> None:
    rows = WORKLOADS["A2-none"].rows
    drawn = [document_lengths(rows, np.random.default_rng(seed)) for seed in range(20)]
    assert {sum(lengths) for lengths in drawn} == {32768}
    mean = np.mean([length for lengths in drawn for length in lengths])
    assert 850 < mean < 1200  # 640 draws of deviation 0.97 means: 4 % of error, and the cut last one is shorter
    assert len({tuple(lengths) for lengths in drawn}) == 20


def test_half_of_the_labels_of_every_document_are_masked() -> None:
    (step,) = make_steps(Rows(1, 512, mean=64, masked=0.5), 100, 1, seed=1)
    bounds = step.batch.cu_seqlens.tolist()
    assert len(bounds) > 3
    for start, end in pairwise(bounds):
        labels = step.batch.labels[0, start:end]
        half = (end - start) // 2
        assert (labels[:half] == IGNORE).all()
        assert (labels[half:-1] == step.batch.input_ids[0, start + half + 1 : end]).all()
        assert labels[-1] == IGNORE


def test_labels_in_transformers_places_train_the_same_tokens() -> None:
    (step,) = make_steps(Rows(2, 64), 100, 1, seed=0)
    theirs = step.rows.unshifted
    trained = theirs != IGNORE
    assert int(trained.sum()) == step.batch.num_label_tokens
    assert (theirs[trained] == step.rows.ids[trained]).all()


def test_one_document_a_row_needs_no_bounds_and_a_pack_does() -> None:
    one, packed = (make_steps(rows, 100, 1, 0)[0] for rows in (Rows(2, 64), Rows(1, 128, mean=24)))
    assert one.batch.documents() is None
    assert one.rows.positions is None
    assert packed.batch.documents() is not None
    assert packed.rows.positions is not None
    assert one.rows.bounds is None
    bounds = packed.rows.bounds
    assert bounds is not None
    assert (packed.rows.positions[0, bounds[:-1].long()] == 0).all()
    assert int((packed.rows.positions == 0).sum()) == len(bounds) - 1
    assert packed.rows.longest == int(packed.rows.positions.max()) + 1


def test_two_rows_a_pair_hold_what_a_shared_prompt_holds() -> None:
    work = tiny(WORKLOADS["E1"])
    (step,) = make_steps(work.rows, 100, 1, seed=0)
    batch, rows = step.batch, step.rows
    assert batch.pairs is not None
    assert batch.pairs.count == 4
    assert rows.ids.shape[0] == 8
    for answer in range(8):
        ours = batch.labels[batch.pairs.segment == answer]
        assert torch.equal(ours, rows.labels[answer][rows.labels[answer] != IGNORE])
        assert len(ours) == rows.scored
    assert (rows.labels[:, : -rows.scored] == IGNORE).all()


def test_another_seed_is_other_data_and_the_same_seed_the_same() -> None:
    a, b, c = (make_steps(Rows(1, 64), 100, 2, seed) for seed in (0, 0, 7))
    assert torch.equal(a[1].rows.ids, b[1].rows.ids)
    assert not torch.equal(a[0].rows.ids, c[0].rows.ids)
    assert not torch.equal(a[0].rows.ids, a[1].rows.ids)


def test_rows_with_pictures_hold_what_the_workload_says_of_them() -> None:
    work = WORKLOADS["V1"]
    (step,) = make_steps(work.rows, 103424, 1, 0, PictureIds.of(work.model))
    batch, rows = step.batch, step.rows
    assert batch.vision is not None
    assert batch.vision.grids.tolist() == [[1, 50, 80]] * 5
    assert len(batch.vision.places) == 5000
    assert batch.vision.patches.shape == (20_000, 588)
    assert batch.num_tokens == 8192
    assert len(batch.cu_seqlens) == 6
    marked = batch.modality[0] != 0
    assert int(marked.sum()) == 5 * 1002
    assert not (batch.labels[0, :-1][marked[1:]] != IGNORE).any(), "no picture is learnt"
    assert batch.num_label_tokens == 8192 - 5 * 1002
    start = int(batch.cu_seqlens[1])
    assert batch.positions[0, start].tolist() == [0, 0, 0]
    assert batch.positions[0, start + 1000].tolist() == [1, 25, 40]
    assert batch.positions[0, start + 1001].tolist() == [41, 41, 41], "text goes on behind the longer side"
    assert rows.vision is batch.vision


def test_a_text_model_has_no_ids_of_pictures() -> None:
    assert PictureIds.of(WORKLOADS["A1"].model) is None
