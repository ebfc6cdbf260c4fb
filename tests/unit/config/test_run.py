"""RunConfig: frozen, stored and read back without loss, and honest about what a resume may change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from erniekit.config import RunConfig, load
from erniekit.config.flat import ALIASES, IGNORED_KEYS, KEYS
from erniekit.config.sections import SECTIONS
from erniekit.errors import ConfigError


def test_a_run_is_frozen():
    cfg = load([])
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.train.seed = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.train = None


def test_sections_are_attributes_whose_fields_are_the_flat_keys():
    cfg = load([])
    assert {f.name for f in dataclasses.fields(cfg)} >= set(SECTIONS)
    assert cfg.flat() == {name: getattr(getattr(cfg, k.section), name) for name, k in KEYS.items()}


def test_no_name_means_two_things():
    assert not set(KEYS) & set(IGNORED_KEYS)
    assert not set(ALIASES) & (set(KEYS) | set(IGNORED_KEYS))
    assert sum(len(dataclasses.fields(cls)) for cls in SECTIONS.values()) == len(KEYS)


def test_a_stored_run_reads_back_equal():
    cfg = load(
        ["--data", "a.jsonl,b.jsonl", "compute_type=fp8", "model_config={a: [1, 2]}", "--fuse_rope", "max_steps=3"]
    )
    again = RunConfig.from_json(cfg.to_json())
    assert again == cfg
    assert RunConfig.from_json(json.loads(cfg.to_json())) == cfg


def test_a_run_stored_by_another_version_still_reads():
    data = load(["max_steps=3"]).to_dict()
    data["values"]["key_of_the_future"] = 1
    del data["values"]["seed"]
    cfg = RunConfig.from_json(data)
    assert (cfg.train.max_steps, cfg.train.seed) == (3, 42)


def test_secrets_are_neither_shown_nor_stored():
    cfg = load(["wandb_api_key=hush"])
    assert cfg.tracking.wandb_api_key == "hush"
    assert "hush" not in cfg.to_json()
    assert "hush" not in str(cfg.flat())


def test_replace_gives_a_new_typed_run():
    cfg = load(["max_steps=3"])
    other = cfg.replace(max_steps="5", learning_rate="1e-3")
    assert (cfg.train.max_steps, other.train.max_steps, other.optim.learning_rate) == (3, 5, 1e-3)
    assert other.origin("max_steps") == "argument"
    with pytest.raises(ConfigError):
        cfg.replace(max_stepz=5)


def test_the_resume_keys_leave_out_the_length_of_the_run_and_places():
    base = load([])
    for word in ("max_steps=9", "save_steps=3", "output_dir=x", "--data=a.jsonl", "logging_steps=2", "device=cpu"):
        other = load([word, "train_dataset_type=auto", "train_dataset_prob=1", "decay_steps=9"])
        same = load(["train_dataset_type=auto", "train_dataset_prob=1", "decay_steps=9"])
        assert other.resume_keys() == same.resume_keys(), word
    assert base.resume_keys() == load([]).resume_keys()


@pytest.mark.parametrize(
    "word", ["seed=1", "batch_size=2", "learning_rate=1", "max_seq_len=64", "compat=erniekit", "lora_rank=3"]
)
def test_the_resume_keys_hold_what_decides_the_next_step(word):
    before, after = load([]).resume_keys(), load([word]).resume_keys()
    assert word.partition("=")[0] in {name for name, value in after.items() if before[name] != value}


def test_resume_keys_survive_json():
    cfg = load(["--data", "a.jsonl", "lora_target_modules=q_proj,v_proj"])
    assert json.loads(json.dumps(cfg.resume_keys())) == cfg.resume_keys()


def test_inert_keys_come_with_their_reason():
    cfg = load(["--fuse_rope", "1"])
    (item,) = cfg.ignored
    assert item.key == "fuse_rope"
    assert "kernel" in item.reason


def test_every_key_has_a_help_sentence():
    assert [name for name, k in KEYS.items() if len(k.help) < 4] == []
