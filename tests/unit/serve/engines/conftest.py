"""Tiny models that the engines of these tests serve."""

from __future__ import annotations

import pytest

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model

FAMILIES = ["ernie4_5", "llama", "ernie4_5_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def found(request, tmp_path_factory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp(request.param), family=request.param))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("small")))
