"""Datasets that are not there, by the words a person reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.errors import DataError
from erniekit.recipes.named_data import refuse_missing_data


@pytest.mark.parametrize("name", ["a b,c.jsonl", "my, data [1] file.jsonl", "a ,b, c.jsonl"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_whose_name_has_a_comma_is_named_whole_with_how_to_give_it(
    tmp_path: Path, streaming: bool, name: str
) -> None:
    file = tmp_path / name
    file.write_text('{"src": ["q"], "tgt": ["a"]}\n')
    with pytest.raises(DataError, match="commas separate datasets") as refused:
        refuse_missing_data(load([f"train_dataset_path={file}", f"streaming={streaming}", "max_steps=1"], "train"))
    assert refused.value.where == f"train_dataset_path: {file}"
    pattern = refused.value.fix.removeprefix("write ? for it: ").partition(";")[0]
    if "[" not in name:  # of a pattern, too
        refuse_missing_data(load([f"train_dataset_path={pattern}", f"streaming={streaming}", "max_steps=1"], "train"))
    recipe = tmp_path / "run.yaml"
    recipe.write_text(refused.value.fix.partition("in a recipe a list: ")[2] + "\n")
    cfg = load([str(recipe), f"streaming={streaming}", "max_steps=1"], "train")
    assert cfg.data.train_dataset_path == (str(file),)
    refuse_missing_data(cfg)


def test_parts_of_another_name_are_looked_for_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "my, datafile.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="does not exist"):
        refuse_missing_data(load([f"train_dataset_path={tmp_path}/my, data file.jsonl", "max_steps=1"], "train"))


def test_the_first_of_several_files_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text('{"src": ["q"], "tgt": ["a"]}\n')
    with pytest.raises(DataError, match="does not exist") as refused:
        refuse_missing_data(load([f"train_dataset_path={tmp_path}/there.jsonl,{tmp_path}/gone.jsonl"], "train"))
    assert refused.value.where == f"{tmp_path}/gone.jsonl"
