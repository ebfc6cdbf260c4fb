"""The recorded tokenizer, and sources opened with it, for tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.data import token_cache, tokenise
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from support.sources import open_source


@pytest.fixture(scope="module")
def tokenizer(paddle: Path) -> Tokenizer:
    return load_tokenizer(paddle / "tokenizer")


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Tokenizer) -> Callable:
    """opened(path, format, option=value, ...) -> its source, in this process, cached in a folder of the test."""

    def call(path, format=None, **options):
        options = {"max_seq_len": 96, "cache_dir": tmp_path / "cache", "num_proc": 1, **options}
        return open_source(path, format, tokenizer, **options)

    return call


@pytest.fixture
def no_tokenising(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, whoever tokenises fails."""

    def refuse(*args, **options):
        raise AssertionError("tokenised again")

    def arm() -> None:
        monkeypatch.setattr(token_cache, "tokenise_file", refuse)
        monkeypatch.setattr(tokenise, "assemble", refuse)

    return arm
