"""How much data a step takes where the recipe leaves it to the size of the data, and what of it is padding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import load
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.demo.tiny import make_tokenizer
from erniekit.devices import cpu
from erniekit.errors import ConfigError, DataError
from erniekit.parallel.layout import Layout
from erniekit.parallel.mesh import World
from erniekit.recipes import stage_of
from erniekit.recipes.datasets import TrainData, accumulation_by_size, dataset_files, file_shares, sources_for
from erniekit.recipes.run_plan import RunPlan
from support.jsonl import small_row, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("samples", "packs", "at_once", "expected"),
    [
        (40, 40, 1, 8),
        (40, 10, 1, 2),  # four pairs a pack
        (500, 500, 2, 8),
        (5_000, 5_000, 1, 32),
        (50_000, 50_000, 1, 32),  # 64 wanted, 32 at most
        (200_000, 50_000, 8, 4),
        (50, 5, 4, 1),
    ],
)
def test_a_negative_accumulation_grows_with_the_data(samples, packs, at_once, expected):
    assert accumulation_by_size(samples, packs, at_once) == expected


def test_a_folder_is_one_source_whose_share_its_files_divide_by_their_samples(tmp_path):
    (tmp_path / "set").mkdir()
    for name, count in (("a.csv", 1), ("b.csv", 3)):
        (tmp_path / "set" / name).write_text("question,answer\n" + "x,y\n" * count)
    single = tmp_path / "c.csv"
    single.write_text("question,answer\nx,y\n")
    cfg = load([f"--data={tmp_path / 'set'},{single}", "train_dataset_prob=0.3,0.7", "model_name_or_path=m"])
    files, formats = dataset_files(cfg, "train")
    assert [(Path(file.path).name, file.entry) for file in files] == [("a.csv", 0), ("b.csv", 0), ("c.csv", 1)]
    assert formats == [None, None, None]
    assert file_shares(cfg, "train", [1, 3, 5]) == pytest.approx([0.075, 0.225, 0.7])
    assert file_shares(cfg, "train", [1, 3, 7])[2] == 0.7  # to the last bit: recorded orders depend on it


def test_pipes_and_links_to_nowhere_in_a_folder_are_refused_before_any_file_is_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [small_row(1)])
    (tmp_path / "b.jsonl").symlink_to("gone")
    os.mkfifo(tmp_path / "c.csv")
    cfg = load([f"--data={tmp_path}", "model_name_or_path=m"])
    with pytest.raises(DataError, match="dataset is a link to gone") as refused:
        dataset_files(cfg, "train")
    assert refused.value.where == f"{tmp_path / 'b.jsonl'}, and 1 more that cannot be opened"
    (tmp_path / "c.csv").unlink()
    with pytest.raises(DataError) as refused:
        dataset_files(cfg, "train")
    assert refused.value.where == str(tmp_path / "b.jsonl")


def test_the_error_of_a_file_in_a_folder_names_the_command_that_checks_them_all(tmp_path, tokenizer):
    folder = tmp_path / "my set"
    folder.mkdir()
    for name in ("a", "b", "c"):
        write_jsonl(folder / f"{name}.jsonl", [small_row(1)] if name == "a" else [{"nothing": "known"}])
    single = folder / "b.jsonl"
    for path, hint in ((folder, f"`erniekit data '{folder}'` checks all files"), (single, "")):
        cfg = load(["model_name_or_path=m", f"cache_dir={tmp_path / 'cache'}", f"--data={path}", "dataset_num_proc=1"])
        with pytest.raises(DataError) as refused:
            sources_for(cfg, "train", tokenizer, None)
        assert refused.value.where.startswith(str(single))
        assert ("erniekit data '" in refused.value.fix) == bool(hint)
        assert refused.value.fix.endswith(hint)


@pytest.mark.parametrize("stage", ["SFT", "PT"])
def test_every_rank_names_the_list_of_bad_rows_that_the_main_rank_writes(stage, tmp_path, tokenizer):
    key = "text" if stage == "PT" else "src"
    rows = [{"text": "a quiet harbor"} if stage == "PT" else small_row(1), {key: 3}, {key: 3}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    options = [f"stage={stage}", f"cache_dir={tmp_path / 'cache'}", "dataset_num_proc=1", "split=1,0,0"]
    cfg = load([f"--data={path}", "model_name_or_path=m", *options])
    listed = tmp_path / "output" / "bad_rows.jsonl"
    for rank, is_there in ((1, False), (0, True), (1, True)):
        plan = RunPlan(cfg, cpu.make(), World(Layout(dp=2), rank), cast(ModelFolder, None), lora=None, mtp_tokens=0)
        with pytest.raises(DataError, match="cannot be used") as refused:
            stage_of(cfg).open_data(plan, tokenizer, listed.parent)
        assert f"(all are listed in {listed})" in refused.value.fix
        assert listed.exists() == is_there, "one rank writes it"


def test_a_hub_dataset_to_evaluate_on_names_its_split():
    cfg = load(["model_name_or_path=m", "eval_dataset_path=owner/name"])
    with pytest.raises(ConfigError, match="which split") as refused:
        dataset_files(cfg, "eval")
    assert "owner/name?split=test" in refused.value.fix


@pytest.mark.parametrize(
    ("sizes", "share", "usual"),
    [
        ([10, 30, 56], 0.5, 64),  # 96 real tokens, 96 of padding
        ([1, 1], 126 / 128, 64),  # far more padding than real tokens
        ([64, 128], 0.0, 96),
    ],
)
def test_padding_is_told_as_its_share_of_all_tokens(sizes, share, usual):
    stream = PackStream(SampleOrder([len(sizes)], [1.0]), [np.array(sizes)], 128, packing=False)
    data = TrainData([], stream, [], 1, 1, 1, 1, 0, 0, 0, World(), 1, lengths=(64, 128), sizes=np.array(sizes))
    assert data.padded_share == pytest.approx(share)
    assert data.usual_size == usual
