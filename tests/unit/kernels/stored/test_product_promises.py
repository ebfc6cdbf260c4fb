"""Products of a kind that are tried when it is loaded: which are refused, and which honest kinds are taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from erniekit.kernels import mxfp4
from erniekit.kernels.stored import Stored, WeightKind, kind_named
from erniekit.kernels.stored.fp8 import Fp8
from erniekit.kernels.stored.int8 import Int8
from erniekit.kernels.stored.promises import broken_promise
from erniekit.weight_kinds import WEIGHT_KINDS

Change = Callable[[torch.Tensor], Any]
PRODUCTS = ("product", "turned_product", "grouped", "turned_grouped")
PLUS = ("product_plus", "turned_product_plus", "grouped_plus", "turned_grouped_plus")


def changed(base: type[WeightKind], change: Change, *methods: str, rows: bool = False) -> WeightKind:
    """A kind whose methods give what `change` makes of the base's results; or of its rows."""

    def method(name: str) -> Callable[..., Any]:
        def called(self: WeightKind, x: torch.Tensor, *given: Any) -> Any:
            own = getattr(base, name)
            return own(self, change(x), *given) if rows else change(own(self, x, *given))

        return called

    return type("Changed", (base,), {name: method(name) for name in methods})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_every_kind_of_ours_keeps_what_it_asks_of_others(kind: str) -> None:
    assert broken_promise(kind_named(kind)) == ""


@pytest.mark.parametrize("method", PRODUCTS)
@pytest.mark.parametrize("base", [Int8, Fp8])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda y: 2 * y, r"gives (2|1\.99|2\.0\d) times"),
        (lambda y: -y, r"gives -(1|0\.99\d|1\.0\d) times"),
        (lambda y: 1.05 * y, r"gives 1\.0\d+ times"),
        (lambda y: y.roll(1, 1), "gives (-?0|another product)"),
        (
            lambda y: torch.cat([y[:, :-1], 2 * y[:, -1:]], 1),
            r"gives another product .* a row or column is 1?\d\d% off",
        ),
        (lambda y: y / 0, "gives numbers that are not finite"),
        (lambda y: (y, y), "gives a value of type tuple, not a tensor"),
        (lambda y: y[:, 1:], r"gives \[\d+, \d+\], not \["),
    ],
)
def test_a_product_of_other_numbers_than_are_unpacked_is_refused(
    base: type[WeightKind], method: str, change: Change, told: str
) -> None:
    broken = broken_promise(changed(base, change, method))
    assert broken.startswith(f"has a `{method}` that gives ")
    assert re.search(told, broken), broken


@pytest.mark.parametrize("method", PRODUCTS)
def test_a_product_that_loses_one_column_of_the_rows_is_refused(method: str) -> None:
    def lost(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :5], torch.zeros_like(x[:, :1]), x[:, 6:]], 1)

    assert f"`{method}` that gives another product" in broken_promise(changed(Int8, lost, method, rows=True))


class Updated(Int8):
    """Adds updates in products of experts too, as on a card."""

    share, updates = 1.0, 2

    def product_plus(self, x: Any, weight: Stored, low: Any, factor: Any, alpha: float) -> Any:
        return self.product(x, weight) + self.share * alpha * low @ factor

    def turned_product_plus(self, grad: Any, weight: Stored, low: Any, factor: Any) -> Any:
        return self.turned_product(grad, weight) + self.share * low @ factor

    def grouped_plus(self, rows: Any, weight: Stored, ends: Any, dtype: Any, tails: Any, scale: float) -> Any:
        return self._added(self.grouped(rows, weight, ends, dtype), ends, tails, scale)

    def turned_grouped_plus(self, rows: Any, weight: Stored, ends: Any, dtype: Any, tails: Any, scale: float) -> Any:
        return self._added(self.turned_grouped(rows, weight, ends, dtype), ends, tails, scale)

    def _added(self, out: torch.Tensor, ends: torch.Tensor, tails: Any, scale: float) -> torch.Tensor:
        bounds = [0, *ends.tolist()]
        for z, factor in tails[: self.updates]:
            for e, (a, b) in enumerate(pairwise(bounds)):
                out[a:b] += self.share * scale * z[a:b] @ factor[e]
        return out


@pytest.mark.parametrize("method", PLUS)
def test_a_product_with_updates_that_adds_something_else_is_refused(method: str) -> None:
    assert broken_promise(Updated()) == ""
    own = {method: getattr(Updated, method), "_added": Updated._added}
    for attributes in ({"share": 0.0}, {"share": -1.0}, {"share": 4.0}, {"updates": 1}):
        kind = type("Other", (Int8,), {**own, "share": 1.0, "updates": 2, **attributes})()
        told = broken_promise(kind)
        if "updates" not in attributes or "grouped" in method:
            assert told.startswith(f"has a `{method}` that gives "), attributes


def _four_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    return ((x / scale).round() * scale).to(x.dtype)


@pytest.mark.parametrize(
    "rounded",
    [
        lambda x: x.bfloat16().to(x.dtype),
        lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
        lambda x: x.to(torch.float8_e5m2).to(x.dtype),
        lambda x: mxfp4.decode(*mxfp4.encode(x.contiguous()), torch.float32).to(x.dtype),
        _four_bits,
    ],
    ids=["bf16", "e4m3", "e5m2", "mxfp4", "int4"],
)
@pytest.mark.parametrize("side", [64, 256])
def test_a_kind_that_rounds_rows_is_taken(rounded: Change, side: int) -> None:
    kind = changed(Int8, rounded, *PRODUCTS, rows=True)
    kind.fits = lambda out, width: width % side == 0  # type: ignore[method-assign]
    assert broken_promise(kind) == ""


class OnACard(Int8):
    """Says that a CPU cannot multiply by it, or fails there."""

    says = True

    def why_not(self, device: torch.device, experts: bool) -> str | None:
        return "it needs a card" if self.says and device.type == "cpu" else None

    def product(self, x: torch.Tensor, weight: Stored) -> torch.Tensor:
        if self.says:
            pytest.fail("it was tried")
        raise RuntimeError("no kernel for a CPU")


@pytest.mark.parametrize("says", [True, False])
def test_products_that_need_a_card_are_not_refused_where_there_is_none(says: bool) -> None:
    kind = OnACard()
    kind.says = says
    assert broken_promise(kind) == ""
    experts = type("Wrong", (OnACard,), {"says": says, "grouped": lambda self, rows, *more: rows * 0})()
    assert bool(broken_promise(experts)) is not says


def test_a_kind_whose_weights_would_be_multiplied_as_plain_ones_is_refused() -> None:
    class Halved(WeightKind):
        name = "halved"

        def pack(self, weight: torch.Tensor, agree: Any = None) -> Stored:
            return Stored(weight.float() / 2)

        def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
            return (weight.data * 2).to(dtype)

    class Passed(Halved):
        def pack(self, weight: torch.Tensor, agree: Any = None) -> Stored:
            return Stored(weight)

        def unpack(self, weight: Stored, dtype: torch.dtype) -> torch.Tensor:
            return weight.data.to(dtype)

    assert "without `kind='halved'`" in broken_promise(Halved())
    assert broken_promise(Passed()) == "", "numbers that it leaves plain"


def test_trying_a_kind_draws_no_number_that_a_run_would_draw() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    broken_promise(kind_named("fp8"))
    assert torch.equal(torch.rand(1), wanted)
