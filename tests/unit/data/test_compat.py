"""`compat: erniekit`: the recorded rows through our reader, order, packer and collator give the recorded batches."""

from __future__ import annotations

import json

import numpy as np
import pytest

from erniekit.data.compat import CompatOrder, CompatPackStream
from erniekit.data.loader import BatchLoader
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import ConfigError, DataError
from support.sources import open_source

LENGTH = 96


@pytest.fixture(scope="module")
def recorded(paddle):
    return json.loads((paddle / "data_sft.json").read_text())


@pytest.fixture(scope="module")
def sources(recorded, paddle, tmp_path_factory):
    """The recorded erniekit rows, and the recorded alpaca rows."""
    folder = tmp_path_factory.mktemp("rows")
    sft, alpaca = folder / "sft.jsonl", folder / "alpaca.json"
    sft.write_text("".join(json.dumps(r["row"], ensure_ascii=False) + "\n" for r in recorded["sft_rows"]))
    alpaca.write_text(json.dumps(recorded["alpaca_rows"], ensure_ascii=False))
    return [
        open_source(
            path,
            format,
            load_tokenizer(paddle / "tokenizer"),
            max_seq_len=LENGTH,
            compat=True,
            cache_dir=folder / "cache",
            max_bad_fraction=1,  # ERNIEKit never stops for bad rows
        )
        for path, format in ((sft, "erniekit"), (alpaca, "alpaca"))
    ]


def token_packs(stream, sources, count):
    return [[sources[s].sample(i).ids.tolist() for s, i in stream[p]] for p in range(count)]


def trained(sources, probs=None, **options):
    order_options = {k: options.pop(k) for k in ("seed", "num_samples_each_epoch", "shuffle") if k in options}
    order = CompatOrder([s.forms() for s in sources], probs, **order_options)
    return CompatPackStream(order, [s.lengths for s in sources], LENGTH, **options)


@pytest.mark.parametrize(("greedy", "name"), [(True, "greedy"), (False, "sequential")])
def test_unshuffled_training_packs_are_the_recorded_ones(sources, recorded, greedy, name):
    expected = recorded[f"sft_train_{name}_no_shuffle_packs"]
    stream = trained(
        sources[:1], seed=1105, num_samples_each_epoch=len(recorded["sft_rows"]), shuffle=False, greedy=greedy
    )
    assert token_packs(stream, sources, len(expected)) == expected


def test_shuffled_training_packs_are_the_recorded_ones(sources, recorded):
    expected = recorded["sft_train_greedy_shuffled_packs_seed_1105_samples_40"]
    stream = trained(sources[:1], seed=1105, num_samples_each_epoch=40)
    assert token_packs(stream, sources, len(expected)) == expected


def test_packs_of_two_mixed_sources_are_the_recorded_ones(sources, recorded):
    expected = recorded["sft_train_mixed_erniekit_0.7_alpaca_0.3_samples_30"]
    stream = trained(sources, [0.7, 0.3], seed=1105, num_samples_each_epoch=30)
    assert token_packs(stream, sources, len(expected)) == expected


def test_evaluation_packs_are_the_recorded_ones_in_the_default_order(sources, recorded):
    order = SampleOrder([len(sources[0])], shuffle=False, strategy="concat")
    stream = PackStream(order, [sources[0].lengths], LENGTH, greedy=False, epochs=1)
    expected = recorded["sft_eval_sequential_packs"]
    assert token_packs(stream, sources, len(stream)) == expected


@pytest.mark.parametrize("run", ["sft_full_dense", "sft_lora_dense", "sft_full_moe"])
def test_the_micro_batches_of_a_recorded_run_come_out_of_the_loader(sources, paddle, run):
    told = json.loads((paddle / "e2e.json").read_text())["runs"][run]
    keys = told["hyper_parameters"]
    stream = trained(sources[:1], seed=keys["seed"], num_samples_each_epoch=keys["num_samples_each_epoch"])
    loader = BatchLoader(
        stream, sources, keys["batch_size"], keys["gradient_accumulation_steps"], pad_to=LENGTH, num_workers=2
    )
    seen = []
    for step in loader:
        seen += step
        if len(seen) == len(told["micro_batches"]):
            break
    assert [m.input_ids.tolist() for m in seen] == [m["input_ids"] for m in told["micro_batches"]]
    assert [m.labels.tolist() for m in seen] == [m["labels"] for m in told["micro_batches"]]


def test_a_pack_is_the_same_whatever_was_asked_before(sources):
    options = {"seed": 23, "num_samples_each_epoch": 64}
    walked = trained(sources[:1], **options)
    packs = [walked[p] for p in range(90)]  # 32 packs an epoch
    assert [trained(sources[:1], **options)[p] for p in (0, 5, len(packs) - 1)] == [packs[0], packs[5], packs[-1]]
    assert [walked[p] for p in range(len(packs))] == packs  # backwards: earlier epochs are replayed


def test_a_row_with_a_system_text_loses_it_after_its_first_draw(sources):
    forms = sources[0].forms()
    changed = forms[forms[:, 0] != forms[:, 1]]
    shorter = sources[0].lengths[changed[:, 0]] - sources[0].lengths[changed[:, 1]]
    assert sorted(shorter.tolist()) == [0, 5, 11, 16]  # 0: it went with the oldest turn, which did not fit
    for first, later in changed:
        assert later >= len(sources[0]) > first
        assert sources[0].row(later) == sources[0].row(first)


def test_a_row_that_only_fits_with_its_system_text_may_leave_an_empty_pack_that_is_not_handed_out():
    # sample 1 opens a second pack, is tokenised again without its system text and dropped; sample 2 takes the pack
    forms = np.array([[0, 0], [1, -1], [2, 2]])[::-1]  # the order reads backwards
    order = CompatOrder([forms], seed=0, num_samples_each_epoch=3, shuffle=False)
    stream = CompatPackStream(order, [np.array([90, 20, 15])], 96, epochs=1)
    assert list(stream) == [[(0, 0)], [(0, 2)]]
    order = CompatOrder([forms[1:]], seed=0, num_samples_each_epoch=2, shuffle=False)
    assert list(CompatPackStream(order, [np.array([90, 20, 15])], 96, epochs=1)) == [[(0, 0)]]


def test_an_epoch_of_steps_is_one_pass_over_the_rows_not_the_virtual_epoch(sources):
    virtual = {"seed": 23, "num_samples_each_epoch": 6000}
    stream = trained(sources[:1], **virtual)
    one_window = trained(sources[:1], **virtual, buffer_size=len(sources[0].forms()))
    one_window[0]
    assert stream.count_packs(1) == one_window._first[1]
    assert stream.count_packs(3) == 3 * stream.count_packs(1)
    assert trained(sources, [0.7, 0.3], **virtual).count_packs(1) < stream.count_packs(1)


def test_what_cannot_be_drawn_is_refused():
    usable, none = np.array([[0, 0]]), np.array([[-1, -1]])
    with pytest.raises(DataError):
        CompatOrder([usable, none], seed=0, num_samples_each_epoch=10)
    with pytest.raises(ConfigError, match="num_samples_each_epoch"):
        CompatOrder([usable, usable], seed=0, num_samples_each_epoch=1)
