"""The first lines of a run, of what they warn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.tokenizer import load_tokenizer
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.run_summary import warn_of_long_rows
from support.jsonl import small_row, write_jsonl
from support.sources import open_sources


def test_samples_longer_than_the_models_positions_are_warned_of(
    paddle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [small_row(i) for i in range(8)])
    tokenizer = load_tokenizer(paddle / "tokenizer")
    sources = open_sources([path], [None], tokenizer, max_seq_len=96, cache_dir=tmp_path / "cache")
    longest = sources[0].report.lengths["max"]
    data = cast("TrainData", SimpleNamespace(sources=sources, evaluation=[]))
    config = ModelFolder(paddle / "dense_old").config
    warn_of_long_rows(data, replace(config, max_positions=longest))
    assert capsys.readouterr().err == ""
    warn_of_long_rows(data, replace(config, max_positions=longest - 1))
    told = capsys.readouterr().err
    assert f"the longest sample has {longest} tokens and the model has {longest - 1} positions" in told
    assert f"max_seq_len={longest - 1} keeps within them" in told
