"""Preference files through cache, order, packs and loader; under compat, ERNIEKit's own micro-batches."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch

from erniekit.data.assemble import Assembled
from erniekit.data.compat import CompatEvalOrder, CompatOrder, CompatPairStream
from erniekit.data.formats import parse_pair
from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.preference import PairRules, PairSample, Preference
from erniekit.data.preference_assemble import assemble_pair
from erniekit.data.preference_collate import collate_pairs
from erniekit.data.report import BadRowsFile
from erniekit.data.token_cache import PairSource
from erniekit.data.types import IGNORE
from erniekit.errors import ConfigError, DataError
from support.jsonl import write_jsonl
from support.sources import open_source, open_sources

LENGTH = 160
RULES = PairRules(2048)


def row(i, **extra):
    better, worse = f"copper lantern {i}", "walnut " * (1 + i % 5)
    return {"src": [f"river {i}"], "tgt": [], "response": [worse, better], "sort": [0, 1 + i % 3], **extra}


@pytest.fixture
def opened(tmp_path, tokenizer):
    def call(path, format=None, **options):
        options = {"max_seq_len": 96, "cache_dir": tmp_path / "cache", "num_proc": 1, "pairs": RULES, **options}
        return open_source(path, format, tokenizer, **options)

    return call


def equal(one: PairSample, other: PairSample) -> bool:
    return (
        one.ids.tolist() == other.ids.tolist()
        and one.labels.tolist() == other.labels.tolist()
        and one.parts() == other.parts()
    )


def test_samples_are_the_assembled_pairs_in_file_order(tmp_path, opened, tokenizer):
    rows = [row(i) for i in range(50)]
    source = opened(write_jsonl(tmp_path / "a.jsonl", rows))
    assert isinstance(source, PairSource)
    assert len(source) == 50
    for i, given in enumerate(rows):
        pair = parse_pair(json.dumps(given).encode(), i + 1, "f", "erniekit")
        assert isinstance(pair, Preference)
        made = assemble_pair(pair, tokenizer, 96, RULES)
        assert isinstance(made, Assembled)
        assert equal(source.sample(i), made.sample)
        assert source.lengths[i] == len(made.sample.ids)
        assert source.row(i) == i + 1
    assert {source.sample(i).score_delta for i in range(3)} == {1.0, 2.0, 3.0}


@pytest.mark.full
def test_many_processes_give_the_same_cache_as_one_and_it_is_made_once(tmp_path, tokenizer):
    rows = [row(i, **({"system": "Be brief."} if i % 9 == 0 else {})) for i in range(2100)]
    rows[100], rows[2050] = "not json", {**row(1), "sort": [1, 1]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    options = {"max_seq_len": 96, "compat": True, "pairs": RULES, "max_bad_fraction": 1}
    made = [
        open_source(path, "erniekit", tokenizer, cache_dir=tmp_path / name, num_proc=n, **options)
        for name, n in (("one", 1), ("two", 2), ("two", 2))
    ]
    names = {file.name for file in made[0].folder.iterdir()}
    assert "parts.npy" in names
    for name in names - {"report.json"}:
        one, two = ((source.folder / name).read_bytes() for source in made[:2])
        assert one == two, name
    assert [source.report.from_cache for source in made] == [False, False, True]
    assert [(p.line, p.kind) for p in made[2].report.first_bad] == [(101, "bad_json"), (2051, "tie")]
    again = made[2].forms()[9]  # ERNIEKit forgets the system text after a row's first draw
    assert again.tolist() == [9, len(made[2]) + 1]
    first, later = (made[2].sample(i) for i in again)
    assert len(later.ids) < len(first.ids)
    assert later.labels[later.labels != IGNORE].tolist() == first.labels[first.labels != IGNORE].tolist()


@pytest.mark.parametrize(
    "change", [{"pairs": PairRules(64)}, {"pairs": PairRules(2048, False)}, {"compat": True}, {"overlong": "truncate"}]
)
def test_whatever_decides_the_tokens_decides_the_cache(tmp_path, opened, change):
    path = write_jsonl(tmp_path / "a.jsonl", [row(1)])
    assert opened(path).folder == opened(path).folder
    assert opened(path).folder != opened(path, **change).folder


def test_a_file_whose_questions_are_all_too_long_names_the_key(tmp_path, opened):
    with pytest.raises(DataError, match="max_prompt_len is 5"):
        opened(write_jsonl(tmp_path / "a.jsonl", [row(1)]), pairs=PairRules(5))


def test_plain_rows_are_no_pairs_and_unknown_formats_are_said_at_once(tmp_path, opened):
    plain = write_jsonl(tmp_path / "a.jsonl", [{"src": ["q"], "tgt": ["a"]}])
    with pytest.raises(DataError, match="no preference pairs") as caught:
        opened(plain)
    assert "chosen" in caught.value.fix
    with pytest.raises(DataError, match="`response` is missing"):
        opened(plain, "erniekit")
    with pytest.raises(ConfigError, match="erniekit"):
        opened(plain, "erniekitt")
    pairs = write_jsonl(tmp_path / "b.jsonl", [row(1)])
    with pytest.raises(DataError, match="DPO"):
        opened(pairs, pairs=None)


def test_bad_and_dropped_pairs_are_counted_and_listed(tmp_path, tokenizer):
    rows = [
        row(1),
        {**row(2), "sort": [1, 1]},
        {**row(3), "response": ["same", "same"]},
        {**row(4), "response": ["copper " * 90, "walnut"]},
    ]
    path, listed = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "bad.jsonl"
    (source,) = open_sources(
        [path],
        [None],
        tokenizer,
        max_seq_len=96,
        cache_dir=tmp_path,
        pairs=RULES,
        max_bad_fraction=1,
        bad_rows=BadRowsFile(listed),
    )
    report = source.report
    assert (report.rows, report.samples) == (4, 1)
    assert report.bad == {"tie": 1}
    assert report.dropped == {"same_answers": 1, "overlong": 1}
    (bad,) = map(json.loads, listed.read_text().splitlines())
    assert (bad["line"], bad["kind"]) == (2, "tie")


@pytest.mark.parametrize("compat", [False, True])
def test_the_report_tells_lengths_of_prompt_chosen_and_rejected_and_what_is_scored(tmp_path, opened, compat, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [row(i) for i in range(30)])
    source = opened(path, compat=compat, pairs=PairRules(2048, mask_out_eos_token=False))
    asked, answers = [], []
    for i in range(30):
        pair = source.sample(i)
        scored = pair.labels != IGNORE
        answers.append((int(scored[: pair.scored].sum()), int(scored[pair.scored :].sum())))
        asked.append(len(pair.ids) - sum(answers[-1]) + (not compat))
    told = source.report.pair_lengths
    for name, lengths in (("prompt", asked), *zip(("chosen", "rejected"), zip(*answers))):
        assert told[name] == {
            "median": int(np.percentile(lengths, 50)),
            "p95": int(np.percentile(lengths, 95)),
            "max": max(lengths),
        }
    assert source.report.trained_tokens == sum(map(sum, answers))
    assert source.report.chosen_longer == sum(chosen > rejected for chosen, rejected in answers)
    first, _, third = opened(path, compat=compat, pairs=PairRules(2048, mask_out_eos_token=False)).report.lines()[:3]
    assert "30 pairs" in first
    assert "scored (cached)" in first
    assert f"rejected {told['rejected']['median']}" in third
    assert "chosen is longer in" in third


def stream(sources, **options):
    order = SampleOrder([len(source) for source in sources], seed=5, shuffle=False)
    return PackStream(order, [source.lengths for source in sources], LENGTH, **options)


def test_several_pairs_share_a_row_and_ranks_share_the_packs(tmp_path, opened):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [row(i) for i in range(40)]))
    packs = stream([source], epochs=1)
    seen = {}
    for rank in range(2):
        loader = BatchLoader(packs, [source], 2, 1, dp_rank=rank, dp_size=2, num_workers=2, collate=collate_pairs)
        for step in loader:
            for batch in step:
                for index, ids in zip(batch.pack_indices, batch.input_ids):
                    seen[index] = ids
    assert sorted(seen) == list(range(len(packs)))
    whole = BatchLoader(packs, [source], 1, collate=collate_pairs)
    batches = [batch for step in whole for batch in step]
    assert sum(batch.weight for batch in batches) == 40
    assert max(batch.weight for batch in batches) > 2
    for batch in batches:
        (index,) = batch.pack_indices
        count = min(len(seen[index]), batch.input_ids.shape[1])
        assert torch.equal(seen[index][:count], batch.input_ids[0][:count])


def test_a_rank_without_a_pack_gets_one_that_weighs_nothing(tmp_path, opened):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [row(1)]))
    packs = stream([source], epochs=1)
    real, filler = (
        next(iter(BatchLoader(packs, [source], 1, dp_rank=rank, dp_size=2, collate=collate_pairs)))[0]
        for rank in range(2)
    )
    assert torch.equal(real.input_ids, filler.input_ids)
    assert torch.equal(real.shared.index, filler.shared.index)
    assert (real.weight, filler.weight, filler.num_label_tokens) == (1, 0, 0)


def test_what_the_reference_said_of_a_pair_travels_with_it_once_it_is_known(tmp_path, opened):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [row(i) for i in range(4)]))
    loader = BatchLoader(stream([source], epochs=1), [source], 2, collate=collate_pairs)
    assert next(iter(loader))[0].pairs.reference is None
    source.reference = np.arange(8, dtype=np.float32).reshape(4, 2)
    batch = next(iter(BatchLoader(stream([source], epochs=1), [source], 2, collate=collate_pairs)))[0]
    assert batch.pairs.reference.tolist() == list(range(2 * batch.pairs.count))


def test_reading_pairs_again_and_again_keeps_memory_flat(tmp_path, opened):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [row(i) for i in range(600)]))
    loader = iter(BatchLoader(stream([source], buffer_size=50), [source], 4, collate=collate_pairs))
    for _ in range(30):
        next(loader)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            for _ in range(20):
                step = next(loader)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    made = 20 * sum(tensor.nbytes for tensor in (step[0].input_ids, step[0].labels, step[0].shared.index))
    assert sizes[2] - sizes[1] < made / 10  # the packer remembers where its windows began, nothing else


# --- compat: erniekit -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(paddle):
    return json.loads((paddle / "data_dpo.json").read_text())


@pytest.fixture(scope="module")
def compat_source(recorded, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    path = write_jsonl(folder / "dpo.jsonl", [told["row"] for told in recorded["rows"]])
    return open_source(
        path,
        "erniekit",
        tokenizer,
        max_seq_len=LENGTH,
        compat=True,
        pairs=PairRules(2048, mask_out_eos_token=False),
        cache_dir=folder,
        max_bad_fraction=1,
    )


def compat_stream(source, seed=0, draws=8, shuffle=True, **options):
    order = CompatOrder([source.forms()], seed=seed, num_samples_each_epoch=draws, shuffle=shuffle, backwards=False)
    return CompatPairStream(order, [source.lengths], LENGTH, **options)


def test_unshuffled_training_packs_are_the_recorded_ones(compat_source, recorded):
    expected = recorded["train_greedy_no_shuffle_packs"]
    packs = compat_stream(compat_source, shuffle=False)
    assert [[compat_source.sample(i).ids.tolist() for _, i in packs[p]] for p in range(len(expected))] == expected


def test_evaluation_packs_are_the_recorded_ones_in_the_default_order(compat_source, recorded):
    packs = stream([compat_source], greedy=False, epochs=1)
    got = [[compat_source.sample(i).ids.tolist() for _, i in members] for members in packs]
    assert got == recorded["eval_sequential_packs"]


@pytest.mark.parametrize("run", ["dpo_full_dense", "dpo_lora_dense"])
def test_the_micro_batches_of_a_recorded_run_come_out_of_the_loader(recorded, paddle, tokenizer, tmp_path, run):
    told = json.loads((paddle / "e2e.json").read_text())["runs"][run]
    keys, expected = told["hyper_parameters"], told["micro_batches"]
    path = write_jsonl(tmp_path / "dpo.jsonl", [row["row"] for row in recorded["rows"]])
    masked = PairRules(2048, mask_out_eos_token=not _scores_end(expected, tokenizer))
    options = {"max_seq_len": LENGTH, "compat": True, "cache_dir": tmp_path, "max_bad_fraction": 1}
    source = open_source(path, "erniekit", tokenizer, pairs=masked, **options)
    packs = compat_stream(source, keys["seed"], keys["num_samples_each_epoch"])
    loader = BatchLoader(
        packs,
        [source],
        keys["batch_size"],
        keys["gradient_accumulation_steps"],
        pad_to=LENGTH,
        collate=collate_pairs,
        num_workers=2,
    )
    seen = []
    for step in loader:
        seen += step
        if len(seen) == len(expected):
            break
    loader.close()
    for batch, micro in zip(seen, expected):
        assert batch.pairs is not None
        assert batch.input_ids.tolist() == micro["input_ids"]
        segment = batch.pairs.segment
        for side, name in ((0, "chosen_labels"), (1, "rejected_labels")):
            assert torch.where((segment >= 0) & (segment % 2 == side), batch.labels, 0).tolist() == micro[name]
        assert batch.weight == len(micro["response_indexs"])


def _scores_end(batches, tokenizer):
    return any(tokenizer.end_id in row for batch in batches for row in batch["chosen_labels"])


def test_the_recorded_evaluation_was_packed_as_ours_is(compat_source, paddle):
    """It is the mean of packs' means, so only the right packs give it; losses a pair are from recorded log-probs."""
    told = json.loads((paddle / "dpo.json").read_text())
    policy = told["by_loss_type"]["sigmoid"]
    logps = [  # policy chosen, policy rejected, reference chosen, reference rejected
        [value for batch in batches for value in batch]
        for batches in (
            [batch["policy_chosen_logps"] for batch in policy],
            [batch["policy_rejected_logps"] for batch in policy],
            told["reference_chosen_logps"],
            told["reference_rejected_logps"],
        )
    ]
    loss = []
    for i, (chosen, rejected, was_chosen, was_rejected) in enumerate(zip(*logps)):
        pair = compat_source.sample(i)
        scored = pair.labels != IGNORE
        lengths = [int(scored[: pair.scored].sum()), int(scored[pair.scored :].sum())]
        longer, shorter = (sum(lengths) / 2 / length for length in lengths)  # normalize_logps
        margin = 0.1 * ((chosen - was_chosen) * longer - (rejected - was_rejected) * shorter)
        loss.append(np.log1p(np.exp(-margin)))
    means = []
    for number in range(2):
        order = CompatEvalOrder([compat_source.forms()], number)
        packs = CompatPairStream(order, [compat_source.lengths], LENGTH, epochs=1)
        assert sorted(i for members in packs for _, i in members) == list(range(8))
        means.append(np.mean([np.mean([loss[i] for _, i in members]) for members in packs]))
    run = json.loads((paddle / "e2e.json").read_text())["runs"]["dpo_lora_dense"]
    assert means[0] == pytest.approx(run["eval_loss_after_each_step"][0], abs=1e-6)  # float32 sums of 500
    assert means[1] != pytest.approx(means[0], abs=1e-4)  # the next evaluation is shuffled otherwise
    plain = CompatEvalOrder([compat_source.forms()], 0, shuffle=False)
    assert plain.take(0, 8)[1].tolist() == list(range(8))


def test_pairs_that_are_dropped_take_no_place_in_the_packers_buffer():
    forms = np.array([[i, i] if i % 3 else [-1, -1] for i in range(30)])
    lengths = np.full(30, 50)
    order = CompatOrder([forms], seed=0, num_samples_each_epoch=30, shuffle=False, backwards=False)
    packs = CompatPairStream(order, [lengths], 100, buffer_size=4, epochs=1)
    usable = [i for i in range(30) if i % 3]
    assert [[i for _, i in members] for members in packs] == [usable[n : n + 2] for n in range(0, 20, 2)]
    odd = CompatPairStream(order, [lengths], 100, buffer_size=3, epochs=1)
    expected = [part for n in range(0, 20, 3) for part in (usable[n : n + 2], usable[n + 2 : n + 3]) if part]
    assert [[i for _, i in members] for members in odd] == expected


def test_an_epoch_of_steps_is_as_many_pairs_as_there_are_rows(compat_source):
    packs = compat_stream(compat_source, seed=23, draws=64)
    counted = packs.count_packs(1)
    pairs = [len(packs[p]) for p in range(counted)]
    assert sum(pairs[:-1]) < len(compat_source.forms()) <= sum(pairs)
    assert packs.count_packs(3) == 3 * counted
