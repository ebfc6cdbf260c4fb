"""A kind of stored weights that an installed package brings: held and counted, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit.config import load
from erniekit.errors import ConfigError
from erniekit.kernels import stored
from erniekit.models.layers.linear import Linear
from support.installed import install

TERNARY = """
import torch
from erniekit.kernels.stored import Stored, WeightKind


class Ternary(WeightKind):
    name = "ternary"

    def pack(self, weight, agree=None):
        scale = weight.abs().float().amax(-1, keepdim=True)
        scale = agree(scale) if agree else scale
        four = (weight / scale).round().add(1).to(torch.uint8).unflatten(-1, (-1, 4))
        return Stored(four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6, scale, kind=self.name)
"""
UNPACK = """
    def unpack(self, weight, dtype):
        four = weight.data[..., None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
        return (four.flatten(-2).to(dtype) - 1) * weight.scale.to(dtype)
"""
SHAPE = """
    def shape(self, weight):
        return weight.data.shape[-2], 4 * weight.data.shape[-1]
"""
PRODUCT = """
    def product(self, x, weight):
        return 2 * super().product(x, weight)
"""


def packed_by(site: Path, text: str, name: str = "ternary") -> Linear:
    install(site, "ternary-kind", {"weight_kinds": f"{name} = ternary_kind:Ternary"}, ternary_kind=text)
    layer = Linear(64, 8, bias=False)
    plain = layer.weight.detach()
    layer.store_as(name)
    layer.pack(plain)
    return layer


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads is forgotten after it."""
    monkeypatch.setattr(stored, "_LOADED", dict(stored._LOADED))
    yield
    stored.bits_of.cache_clear()


@pytest.mark.usefixtures("kinds")
def test_a_packages_kind_of_weights_is_held_and_its_bits_are_counted(site: Path) -> None:
    layer = packed_by(site, TERNARY + UNPACK + SHAPE)
    assert layer.stored().data.shape == (8, 16)
    assert stored.bits_of("ternary") == 2
    with pytest.raises(ConfigError, match=r"expected one of .*nf4, wint4/8, ternary"):
        load(["frozen_base=int5"], "train")


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        (TERNARY, "ternary", "does not define unpack"),
        (TERNARY + UNPACK + SHAPE, "three", "names itself 'ternary'"),
        (TERNARY + UNPACK, "ternary", r"packs a weight of \(8, 64\) as one of \(8, 16\)"),
        ("Ternary = 3", "ternary", "is not a subclass of WeightKind"),
        (TERNARY + UNPACK.replace("- 1)", "- 1) / 2") + SHAPE, "ternary", "packs what it unpacked as other numbers"),
        (
            TERNARY.replace("amax(-1, keepdim=True)", "amax().expand(len(weight), 1)") + UNPACK + SHAPE,
            "ternary",
            "packs rows otherwise without the rows before them",
        ),
        (
            TERNARY.replace("if agree", "if False") + UNPACK + SHAPE,
            "ternary",
            "packs half the columns of a row otherwise",
        ),
        (
            TERNARY.replace("scale, kind", "scale.t(), kind")
            + UNPACK.replace("weight.scale", "weight.scale.t()")
            + SHAPE,
            "ternary",
            r"its first dimension must be rows",
        ),
        (
            TERNARY + UNPACK.replace("to(dtype)\n", "float()\n") + SHAPE,
            "ternary",
            r"unpacks \[\d+, \d+\] in bfloat16 as",
        ),
        (
            TERNARY + UNPACK + SHAPE + PRODUCT,
            "ternary",
            r"package ternary-kind 1\.0 has a `product` that gives 2 times the product with what it unpacks",
        ),
        (
            TERNARY + UNPACK + SHAPE + PRODUCT.replace("product", "turned_product").replace("2 *", "-"),
            "ternary",
            "has a `turned_product` that gives -1 times the product with what it unpacks",
        ),
    ],
)
def test_a_packages_kind_of_weights_that_cannot_work_is_refused_with_the_reason(
    site: Path, text: str, name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        packed_by(site, text, name)
