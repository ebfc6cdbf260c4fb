"""Batches of pairs: the packed layout says exactly what two plain sequences per pair would."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.preference import PairSample
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.types import IGNORE, Batch, Pack


def pair(
    prompt: int, chosen: int, rejected: int, first: int = 1, delta: float = 1.0, compat: bool = False
) -> PairSample:
    """Prompt and answers of so many tokens, ids numbered from `first`; all answer tokens are scored."""
    ids = list(range(first, first + prompt + chosen + rejected))
    prompt_ids, chosen_ids, rejected_ids = ids[:prompt], ids[prompt : prompt + chosen], ids[prompt + chosen :]
    if compat:
        row = ids
        labels, shared = [IGNORE] * (prompt - 1) + chosen_ids + rejected_ids + [IGNORE], prompt
    else:
        row = prompt_ids + chosen_ids[:-1] + prompt_ids[-1:] + rejected_ids[:-1]
        labels, shared = [IGNORE] * (prompt - 1) + chosen_ids + rejected_ids, prompt - 1
    at = shared + chosen
    return PairSample(np.array(row, np.int32), np.array(labels, np.int32), shared, at, at - compat, delta)


def seen(batch: Batch) -> np.ndarray:
    """The dense mask that cu_seqlens and shared stand for: [B * L, B * L], query sees key."""
    count = batch.input_ids.numel()
    mask = np.zeros((count, count), dtype=bool)
    assert batch.shared is not None
    bounds, keys, index = batch.cu_seqlens.tolist(), batch.shared.bounds.tolist(), batch.shared.index.numpy()
    assert len(bounds) == len(keys)
    for s in range(len(bounds) - 1):
        queries, those = range(bounds[s], bounds[s + 1]), index[keys[s] : keys[s + 1]]
        for i, query in enumerate(queries):
            mask[query, those[: len(those) - (len(queries) - 1 - i)]] = True
    return mask


def plain(packs: list[Pack], length: int) -> np.ndarray:
    """The same from the meaning: a pair is two causal sequences that have a beginning in common."""
    count = len(packs) * length
    mask = np.zeros((count, count), dtype=bool)

    def causal(places: list[int]) -> None:
        for i, query in enumerate(places):
            mask[query, places[: i + 1]] = True

    for row, pack in enumerate(packs):
        at = row * length
        for sample in pack.samples:
            assert isinstance(sample, PairSample)
            everything = list(range(at, at + len(sample.ids)))
            causal(everything[: sample.rejected])
            causal(everything[: sample.shared] + everything[sample.rejected :])
            at += len(sample.ids)
        causal(list(range(at, (row + 1) * length)))
    return mask


def test_a_row_is_pairs_end_to_end_then_padding_each_with_its_own_keys():
    batch = collate_pairs([Pack((pair(3, 2, 2, delta=2.5), pair(1, 1, 2, first=50)), 4)], pad_multiple=4)
    # 1 2 3 | 4 and 3 | 6; then 50 alone and 50 | 52
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 3, 6, 50, 50, 52, 0, 0, 0]]
    assert batch.labels.tolist() == [[IGNORE, IGNORE, 4, 5, 6, 7, 51, 52, 53, *[IGNORE] * 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 0, 0, 1, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 7, 9, 12]
    assert batch.shared is not None
    assert batch.shared.index.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.shared.bounds.tolist() == [0, 4, 8, 9, 11, 14]
    assert (batch.max_doc, batch.shared.longest) == (4, 4)
    assert batch.pairs is not None
    assert batch.pairs.segment.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 3, 3, -1, -1, -1]]
    assert batch.pairs.score_delta.tolist() == [2.5, 1.0]
    assert batch.pairs.reference is None
    assert (batch.pairs.count, batch.weight, batch.num_label_tokens, batch.num_tokens) == (2, 2, 7, 9)
    assert batch.real is not None
    assert batch.real.tolist() == [[True] * 9 + [False] * 3]
    assert (batch.pack_indices, batch.packed) == ((4,), True)
    assert batch.sum_squares == 4**2 + (4**2 - 2**2) + 1 + 2**2


def test_types_are_those_the_model_asks_for():
    batch = collate_pairs([Pack((pair(3, 2, 2),))])
    assert batch.shared is not None
    assert batch.pairs is not None
    long = (batch.input_ids, batch.labels, batch.positions, batch.shared.index, batch.pairs.segment)
    assert {tensor.dtype for tensor in long} == {torch.int64}
    assert {batch.cu_seqlens.dtype, batch.shared.bounds.dtype} == {torch.int32}
    assert batch.pairs.score_delta.dtype == torch.float32


def test_full_rows_have_no_padding():
    batch = collate_pairs([Pack((pair(3, 3, 3),))], pad_multiple=8)
    assert batch.input_ids.shape == (1, 8)
    assert batch.real is None
    assert batch.cu_seqlens.tolist() == [0, 5, 8]


def test_rows_are_exactly_pad_to_when_given():
    assert collate_pairs([Pack((pair(3, 3, 3),))], pad_to=20).input_ids.shape == (1, 20)
    with pytest.raises(ValueError, match="row of 7"):
        collate_pairs([Pack((pair(3, 3, 3),))], pad_to=7)


def test_a_pair_without_a_label_takes_part_in_nothing_but_the_forward_pass():
    whole = pair(3, 2, 2)
    empty = PairSample(whole.ids, np.full_like(whole.labels, IGNORE), whole.shared, whole.rejected, whole.scored)
    batch = collate_pairs([Pack((empty, whole, empty))])
    assert batch.pairs is not None
    assert batch.pairs.count == 1
    assert sorted(set(batch.pairs.segment.flatten().tolist())) == [-1, 0, 1]
    nothing = collate_pairs([Pack((empty,))])
    assert nothing.weight == 0
    assert nothing.pairs is not None
    assert nothing.pairs.score_delta.shape == (0,)
    assert (nothing.pairs.segment == -1).all()


sizes = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.booleans())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=3))
def test_masks_positions_and_scores_are_those_of_two_plain_sequences_a_pair(rows):
    packs = [Pack(tuple(pair(p, c, r, compat=old) for p, c, r, old in row), i) for i, row in enumerate(rows)]
    batch = collate_pairs(packs)
    height, length = batch.input_ids.shape
    np.testing.assert_array_equal(seen(batch), plain(packs, length))
    assert set(range(0, height * length + 1, length)) <= set(batch.cu_seqlens.tolist())
    assert batch.shared is not None
    assert batch.pairs is not None
    bounds = batch.shared.bounds.numpy()
    assert batch.shared.longest == np.diff(bounds).max()
    assert batch.max_doc == np.diff(batch.cu_seqlens.numpy()).max()
    # a query's position is how many keys it sees before itself
    np.testing.assert_array_equal(seen(batch).sum(1) - 1, batch.positions.flatten().numpy())
    number = 0
    labels, segment = batch.labels.numpy(), batch.pairs.segment.numpy()
    for row, pack in enumerate(packs):
        for sample in pack.samples:
            assert isinstance(sample, PairSample)
            p, c, r, _ = [s for one in rows for s in one][number]
            assert labels[row][segment[row] == 2 * number].tolist() == list(range(1 + p, 1 + p + c))
            assert labels[row][segment[row] == 2 * number + 1].tolist() == list(range(1 + p + c, 1 + p + c + r))
            number += 1
    assert number == batch.pairs.count
    assert ((segment >= 0) == (labels != IGNORE)).all()


def test_the_recorded_batch_comes_out_equal(paddle):
    told = json.loads((paddle / "data_dpo.json").read_text())
    by_ids = {tuple(r["result"]["input_ids"]): r["result"] for r in told["rows"] if "result" in r}

    def recorded(ids):
        result = by_ids[tuple(ids)]
        both = np.array(result["chosen_labels"]) + np.array(result["rejected_labels"])
        start = result["attn_mask_start_row_indices"]
        shared = next(i for i, end in enumerate(start) if end != len(ids))
        scored = next(i for i, label in enumerate(result["rejected_labels"]) if label)
        labels = np.where(both == 0, IGNORE, both).astype(np.int32)
        return PairSample(np.array(ids, np.int32), labels, shared, start[shared], scored)

    packs = [Pack(tuple(map(recorded, pack))) for pack in told["eval_sequential_packs"][:2]]
    batch, expected = collate_pairs(packs, pad_to=told["max_seq_len"]), told["eval_collated_first_two"]
    assert batch.pairs is not None
    assert batch.real is not None
    assert batch.input_ids.tolist() == expected["input_ids"]
    assert batch.positions.masked_fill(~batch.real, 0).tolist() == expected["position_ids"]
    labels, segment = batch.labels, batch.pairs.segment
    for side, name in ((0, "chosen_labels"), (1, "rejected_labels")):
        assert torch.where((segment >= 0) & (segment % 2 == side), labels, 0).tolist() == expected[name]
    rows = segment.flatten()[segment.flatten() >= 0].tolist()  # ERNIEKit indexes the scored places, end to end
    ends = [[rows.index(2 * n), rows.index(2 * n + 1), len(rows) - rows[::-1].index(2 * n + 1)] for n in range(4)]
    assert ends == [index[1:] for index in expected["response_indexs"]]
    start = np.array(expected["attn_mask_start_row_indices"])[:, 0]
    width = start.shape[1]
    place = np.arange(width)
    dense = (place[None, :] <= place[:, None]) & (place[:, None] < start[:, None, :])
    mask = seen(batch)
    for row in range(2):
        real = batch.real[row].numpy()
        ours = mask[row * width : (row + 1) * width, row * width : (row + 1) * width]
        np.testing.assert_array_equal(ours[real][:, real], dense[row][real][:, real])
