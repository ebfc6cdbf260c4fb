"""Which documents a pre-training run trains and evaluates on, and what it says when there are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, for_world, load
from erniekit.data.report import BadRowsFile
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.demo.tiny import make_tokenizer
from erniekit.devices import cpu
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.recipes import stage_of
from erniekit.recipes.pretrain import open_rows
from erniekit.recipes.run_plan import RunPlan


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def text(root: Path) -> Path:
    return root / "examples" / "data"


def run(tmp_path: Path, *words: str):
    return load(["stage=PT", "max_seq_len=64", f"cache_dir={tmp_path}", "dataset_num_proc=1", *words])


def alone(cfg: RunConfig) -> RunPlan:
    """On this process, of no model: opening data does not look at it."""
    return RunPlan(cfg, cpu.make(), World(), cast(ModelFolder, None), lora=None, mtp_tokens=0)


def count(part) -> int:
    return sum(len(source.rows.part) for source in part.sources)


def test_the_split_divides_the_documents(tmp_path, text, tokenizer):
    cfg = run(tmp_path, f"train_dataset_path={text / 'pretrain.jsonl'}", "split=900,50,50")
    parts = [count(open_rows(cfg, part, tokenizer, None)) for part in ("train", "eval", "test")]
    assert parts == [558, 31, 31]


def test_an_evaluation_file_leaves_all_documents_to_training(tmp_path, text, tokenizer):
    files = [f"train_dataset_path={text / 'pretrain.jsonl'}", f"eval_dataset_path={text / 'pretrain-eval.jsonl'}"]
    cfg = run(tmp_path, *files)
    assert count(open_rows(cfg, "train", tokenizer, None)) == 620
    assert count(open_rows(cfg, "eval", tokenizer, None)) == 24


def test_held_out_rows_come_once_in_file_order(tmp_path, text, tokenizer):
    cfg = run(tmp_path, f"train_dataset_path={text / 'pretrain.jsonl'}")
    _, batches = stage_of(cfg).held_out(cfg, tokenizer, BadRowsFile(tmp_path / "bad.jsonl"), World())
    part = open_rows(cfg, "eval", tokenizer, None)
    assert sum(batch.num_tokens for batch in batches) == part.rows.sources[0].tokens - 1
    assert [s.report.trained_tokens for s in part.sources] == [part.rows.sources[0].tokens - 31]


def test_masks_are_on_unless_they_are_turned_off(tmp_path, text, tokenizer):
    words = [f"train_dataset_path={text / 'pretrain.jsonl'}"]
    longest = {}
    for name, more in (("ours", []), ("theirs", ["compat=erniekit"]), ("asked", ["use_global_causal_attn=1"])):
        data = stage_of(cfg := run(tmp_path, *words, *more)).open_data(alone(cfg), tokenizer, tmp_path)
        longest[name] = max(len(data.pack(k).samples) for k in range(20))
    assert longest["ours"] > 1
    assert (longest["theirs"], longest["asked"]) == (1, 1)


def test_steps_are_counted_from_epochs_and_from_the_global_batch(tmp_path, text, tokenizer):
    cfg = run(tmp_path, f"train_dataset_path={text / 'pretrain.jsonl'}", "global_batch_size=8", "num_train_epochs=0.5")
    cfg = for_world(cfg, 1)
    data = stage_of(cfg).open_data(alone(cfg), tokenizer, tmp_path)
    assert data.packs_per_step == 8
    assert data.max_steps == math.ceil(math.ceil(data.packs_per_epoch / 2) / 8)


def test_without_text_it_says_how_to_name_some(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="no text to train on") as e:
        open_rows(run(tmp_path), "train", tokenizer, None)
    assert "erniekit data index" in e.value.fix
