"""Batches: padding, positions and document bounds."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.collate import collate, collate_joined
from erniekit.data.types import IGNORE, Pack, Sample


def sample(*ids, labels=None):
    labels = ids if labels is None else labels
    return Sample(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))


def test_rows_are_documents_end_to_end_then_padding_as_a_document_of_its_own():
    packs = [
        Pack((sample(5, 6, 7, labels=[IGNORE, 7, 2]), sample(8, 9, labels=[9, 2])), 4),
        Pack((sample(1, 2, 3, 4),), 5),
    ]
    batch = collate(packs, pad_id=0, pad_multiple=8)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert batch.labels.tolist()[0] == [IGNORE, 7, 2, 9, 2, IGNORE, IGNORE, IGNORE]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 12, 16]
    assert (batch.max_doc, batch.num_label_tokens, batch.pack_indices) == (4, 8, (4, 5))
    assert str(batch.cu_seqlens.dtype) == "torch.int32"
    assert {str(t.dtype) for t in (batch.input_ids, batch.labels, batch.positions)} == {"torch.int64"}


def test_what_metrics_and_attention_need_leaves_padding_out():
    two = collate([Pack((sample(1, 2, 3), sample(4, 5))), Pack((sample(6),))])
    assert (two.num_tokens, two.sum_squares, two.packed) == (6, 9 + 4 + 1, True)
    assert two.documents() is two.cu_seqlens
    alone = collate([Pack((sample(1, 2, 3),)), Pack((sample(6),))])
    assert not alone.packed
    assert alone.documents() is None


def test_a_full_row_has_no_padding_document():
    batch = collate([Pack((sample(*range(8)),))], pad_multiple=8)
    assert batch.cu_seqlens.tolist() == [0, 8]


def test_rows_are_exactly_pad_to_when_given():
    assert collate([Pack((sample(1, 2, 3),))], pad_to=20).input_ids.shape == (1, 20)
    with pytest.raises(ValueError, match="row of 2"):
        collate([Pack((sample(1, 2, 3),))], pad_to=2)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=4))
def test_bounds_cover_all_tokens_rows_are_bounds_and_positions_restart_at_each(rows):
    packs = [Pack(tuple(sample(*range(1, n + 1)) for n in row)) for row in rows]
    batch = collate(packs)
    height, width = batch.input_ids.shape
    bounds = batch.cu_seqlens.tolist()
    assert width % 8 == 0
    assert width - max(map(sum, rows)) < 8
    assert set(range(0, height * width + 1, width)) <= set(bounds)
    assert bounds == sorted(set(bounds))
    positions = batch.positions.flatten().tolist()
    for begin, end in pairwise(bounds):
        assert positions[begin:end] == list(range(end - begin))
    assert batch.max_doc == max(b - a for a, b in pairwise(bounds))
    assert batch.num_label_tokens == sum(map(sum, rows))


def test_the_recorded_batch_comes_out_equal(paddle):
    recorded = json.loads((paddle / "data_sft.json").read_text())
    by_ids = {tuple(r["result"]["token_ids"]): r["result"] for r in recorded["sft_rows"] if r.get("result")}

    def trained(ids):
        result = by_ids[tuple(ids)]
        labels = [a if m else IGNORE for a, m in zip(result["labels"], result["loss_mask"])]
        return sample(*ids, labels=labels)

    packs = [Pack(tuple(map(trained, pack))) for pack in recorded["sft_eval_sequential_packs"][:2]]
    batch = collate(packs, pad_to=recorded["max_seq_len"])
    expected = recorded["sft_eval_collated_first_two"]
    assert batch.input_ids.tolist() == expected["input_ids"]
    assert batch.labels.tolist() == expected["labels"]
    assert start_rows(batch, [sum(map(len, p)) for p in recorded["sft_eval_sequential_packs"][:2]]) == [
        row[0] for row in expected["attn_mask_start_row_indices"]
    ]


def start_rows(batch, used):
    """FlashMask's form of the same bounds: the row from which a column is hidden; padding hides from itself on."""
    width = batch.input_ids.shape[1]
    out = np.zeros(batch.input_ids.numel(), dtype=int)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        row, column = divmod(begin, width)
        out[begin:end] = end - row * width if column < used[row] else np.arange(column, width)
    return out.reshape(-1, width).tolist()


def test_further_tokens_stay_within_their_document_and_are_trained_where_both_positions_are() -> None:
    first = Sample(np.array([11, 12, 13, 14], np.int32), np.array([IGNORE, 13, 14, 2], np.int32))
    second = Sample(np.array([21, 22, 23], np.int32), np.array([22, IGNORE, 2], np.int32))
    batch = collate([Pack((first, second))], pad_to=9, ahead=2)
    assert batch.future is not None
    ids, labels = batch.future.ids[0].T.tolist(), batch.future.labels[0].T.tolist()
    X = IGNORE
    assert ids == [[12, 13, 14, 0, 22, 23, 0, 0, 0], [13, 14, 0, 0, 23, 0, 0, 0, 0]]
    assert labels == [[X, 14, 2, X, X, X, X, X, X], [X, 2, X, X, 2, X, X, X, X]]
    assert collate([Pack((first,))]).future is None


def test_one_count_runs_through_a_row_and_changes_no_bounds() -> None:
    docs = (Sample(np.array([5, 6], np.int32), np.array([6, 2], np.int32)),) * 2
    batch = collate([Pack(docs), Pack(docs[:1])], pad_to=5, one_count=True)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.cu_seqlens.tolist() == collate([Pack(docs), Pack(docs[:1])], pad_to=5).cu_seqlens.tolist()


def test_joined_rows_are_one_row_of_the_shortest_length_that_holds_them():
    packs = [Pack((sample(5, 6, 7),), 4), Pack((sample(1, 2, 3, 4, labels=[IGNORE, 3, 4, 2]),), 5)]
    batch = collate_joined(packs, lengths=(4, 8, 16))
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 2, 3, 4, 0]]
    assert batch.labels.tolist() == [[5, 6, 7, IGNORE, 3, 4, 2, IGNORE]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8]
    assert batch.documents() is not None
    assert (batch.rows, batch.num_tokens, batch.num_label_tokens, batch.pack_indices) == (2, 7, 6, (4, 5))
    assert batch.sum_squares == 9 + 16
    assert batch.members.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert batch.real.int().tolist() == [[1, 1, 1, 1, 1, 1, 1, 0]]


def test_one_row_alone_stays_a_plain_causal_row_and_a_full_one_is_of_the_same_kind():
    batch = collate_joined([Pack((sample(5, 6, 7),), 4)], lengths=(3, 8))
    assert batch.documents() is None
    assert batch.members is None
    assert batch.real.tolist() == [[True, True, True]]
