"""The key length_buckets: a word, or rising lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "want", "lengths"),
    [
        ("auto", ("auto",), ()),
        ("off", ("off",), ()),
        ("false", ("off",), ()),
        ("on", ("on",), ()),
        ("4096,6144", ("4096", "6144"), (4096, 6144)),
        ("[512, 1024]", ("512", "1024"), (512, 1024)),
        ("2048", ("2048",), (2048,)),
    ],
)
def test_words_and_lengths_are_read_from_yaml(
    written: str, want: tuple[str, ...], lengths: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"length_buckets: {written}\n")
    data = load([str(file)]).data
    assert (data.length_buckets, data.written_lengths) == (want, lengths)


@pytest.mark.parametrize("written", ["sometimes", "4096,on", "6144,4096", "0", "-8", "4096,4096"])
def test_what_is_neither_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="rising numbers of tokens"):
        load([f"length_buckets={written}"])
