"""Without the extra `vision` its name is said, and everything else goes on."""

from __future__ import annotations

import sys

import pytest

from erniekit.data.media import picture, video
from erniekit.errors import DataError
from support.seen import LIMITS, MEDIA


@pytest.mark.parametrize(("package", "read"), [("PIL", picture.read_header), ("av", video.read_header)])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, read, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as missing:
        read((MEDIA / "a.png").read_bytes(), "a.png", LIMITS)
    assert missing.value.fix == 'pip install "erniekit-torch[vision]"'
