"""How much data a step takes where the recipe leaves it to the size of the data, and what of it is padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.config import load
from erniekit.data.mix import SampleOrder
from erniekit.data.pack import PackStream
from erniekit.errors import ConfigError
from erniekit.parallel.mesh import World
from erniekit.recipes.datasets import TrainData, accumulation_by_size, dataset_files, file_shares


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
