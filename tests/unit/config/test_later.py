"""What a later version brings is listed for any recipe and refused by name when it is run."""

from __future__ import annotations

import pytest

from erniekit.config import later, load, need, refuse_later
from erniekit.config.flat import KEYS
from erniekit.config.later import LIST
from erniekit.errors import ConfigError, LaterError


@pytest.mark.parametrize(
    "word",
    [
        "stage=DPO",
        "stage=PT",
        "stage=VL-SFT",
        "stage=OCR-VL-SFT",
        "compute_type=fp8",
        "compute_type=fp16",
        "compute_type=wint8",
        "compute_type=wint4/8",
        "compute_type=nf4",
        "tensor_parallel_degree=2",
        "pipeline_parallel_degree=2",
        "sharding_parallel_degree=2",
        "data_parallel_degree=2",
        "sep_parallel_degree=2",
        "context_parallel_degree=2",
        "expert_parallel_degree=2",
        "device=npu",
        "optim=adafactor",
        "attention_probs_dropout_prob=0.1",
    ],
)
def test_it_resolves_and_is_refused_by_name(word):
    cfg = load([word])
    key = word.partition("=")[0]
    assert key in {item.key for item in later(cfg)}
    with pytest.raises(LaterError) as e:
        refuse_later(cfg)
    assert key in e.value.where
    assert e.value.fix


def test_a_plain_run_needs_nothing():
    cfg = load(["--data", "a.jsonl", "model_name_or_path=m"])
    assert later(cfg) == []
    refuse_later(cfg)


def test_what_changes_no_result_is_listed_but_does_not_stop():
    cfg = load(["--offload_optim"])
    assert [item.stops for item in later(cfg)] == [False]
    refuse_later(cfg)


def test_commands_that_use_one_process_ignore_the_layout():
    refuse_later(load(["tensor_parallel_degree=8", "compute_type=wint4/8"], "export"))


def test_every_row_names_declared_keys():
    assert {key for rows in LIST.values() for row in rows for key in row.keys} <= set(KEYS)


def test_needed_keys_are_asked_for_with_their_help():
    with pytest.raises(ConfigError) as e:
        need(load([]), "model_name_or_path", "train_dataset_path")
    assert "model_name_or_path and train_dataset_path" in e.value.what
    assert "hub id" in e.value.fix
