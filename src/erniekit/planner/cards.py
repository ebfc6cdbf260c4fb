"""CARDS: devices by their data sheets, and CardRates: what is measured, or else expected, of one of them.

Every figure here is a vendor's, but those of `MEASURED`, which are from docs/performance.md (one H200). A calibration
file (`erniekit bench --calibrate`) takes the place of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

GIB = 1024**3


@dataclass(frozen=True)
class Card:
    """One device as torch sees it: a board of two chips is two. CardRates in units a second."""

    name: str
    memory: float  # bytes
    flops: float  # dense bf16 (fp16 where there is no bf16)
    bandwidth: float  # bytes of its own memory
    link: float  # bytes between devices of one machine, each way
    network: float = 25e9  # bytes between machines, for each device and way: 200 Gbit/s
    triton: bool = False  # our fused kernels run on it
    fp8: bool = False
    vendor: str = "nvidia"  # as the key `device` names it
    overlaps: bool = True  # transfers overlap with the computation; on a CPU they take its cores


def _card(name: str, gib: float, tflops: float, tbs: float, link: float, **more: Any) -> Card:
    return Card(name, gib * GIB, tflops * 1e12, tbs * 1e12, link * 1e9, **more)


_NV: dict[str, Any] = dict(triton=True, network=50e9)
CARDS: dict[str, Card] = {
    card.name.lower(): card
    for card in (
        _card("H200", 139.8, 989.4, 4.8, 450, fp8=True, **_NV),
        _card("H100", 79.6, 989.4, 3.35, 450, fp8=True, **_NV),
        _card("H800", 79.6, 989.4, 3.35, 200, fp8=True, **_NV),
        _card("H20", 95.6, 148.0, 4.0, 450, fp8=True, **_NV),
        _card("A100", 79.3, 312.0, 2.04, 300, triton=True),
        _card("A800", 79.3, 312.0, 2.04, 200, triton=True),
        _card("L40S", 44.5, 362.0, 0.864, 32, fp8=True, triton=True, network=12.5e9),
        _card("BI150", 32.0, 96.0, 0.8, 32, network=12.5e9, vendor="iluvatar"),
        _card("BI100", 32.0, 73.5, 1.2, 32, network=12.5e9, vendor="iluvatar"),
        _card("Ascend", 64.0, 376.0, 1.6, 196, network=25e9, vendor="ascend"),
        _card("P800", 96.0, 345.0, 2.0, 200, network=25e9, vendor="kunlunxin"),
        _card("MI300X", 191.5, 1307.4, 5.3, 448, network=50e9, vendor="amd"),
        _card("C550", 64.0, 280.0, 1.8, 64, network=25e9, vendor="metax"),
        _card("S5000", 80.0, 500.0, 1.6, 100, network=25e9, vendor="musa"),
        _card("CPU", 16.0, 0.2, 0.02, 5, network=1e9, vendor="cpu", overlaps=False),
    )
}
ALSO = {"910b": "ascend", "bi-v150": "bi150", "bi-v100": "bi100", "gb200": "h200", "mi300": "mi300x"}
# A card of which only the memory is given: the slowest that is sold with so much, so that no plan is too good.
BY_MEMORY = ((36, "bi150"), (50, "l40s"), (70, "ascend"), (88, "a100"), (110, "p800"), (150, "h200"), (1e9, "mi300x"))


@dataclass(frozen=True)
class CardRates:
    """What a device does a second. source: of each, `measured` or `data sheet`."""

    dense: float  # FLOPs of plain products
    grouped: float  # of experts' products
    attention: tuple[tuple[int, float], ...]  # (length of a document, FLOPs as models/costs.py counts them)
    elementwise: float  # bytes
    update: float  # bytes of the optimiser
    layer_launch: float  # seconds the host needs for a dense layer, both ways
    expert_launch: float
    link: float
    network: float
    latency: float = 20e-6  # of a collective
    host: float = 50e9  # bytes a second from and to pinned host memory
    source: Mapping[str, str] = field(default_factory=dict)

    def attention_at(self, length: float) -> float:
        """Between two lengths by their logarithm's neighbours; beyond the ends as at the ends."""
        from math import log

        points = self.attention
        if length <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in itertools.pairwise(points):
            if length <= b:
                return low + (high - low) * log(length / a) / log(b / a)
        return points[-1][1]


# Of the H200 at the clocks it holds (docs/performance.md, "Where a step's time went").
MEASURED = CardRates(
    dense=690e12, grouped=585e12,
    attention=((256, 110e12), (1024, 283e12), (4096, 411e12), (8192, 475e12), (32768, 490e12), (131072, 470e12)),
    elementwise=2.8e12, update=3.7e12, layer_launch=2.3e-3, expert_launch=10e-3, link=450e9, network=50e9,
    source=dict.fromkeys(("dense", "grouped", "attention", "elementwise", "update", "launch"), "measured")
    | dict.fromkeys(("link", "network"), "data sheet"),
)  # fmt: skip
PLAIN_SHARE = 0.6  # of the H200's efficiency that a device without our kernels is expected to reach
LINK_SHARE = 0.75  # of a data sheet's link that collectives reach
PLAIN_EXPERTS = 0.5  # grouped products without a kernel for them


def rates_of(card: Card, calibrated: Mapping[str, Any] | None = None) -> CardRates:
    """Of a card by its data sheet, with the shares of peak that the H200 reaches; or as calibrated on it."""
    top = CARDS["h200"]
    found = MEASURED
    if card.name != top.name:
        flops, bytes_ = card.flops / top.flops, card.bandwidth / top.bandwidth
        share = 1.0 if card.triton else PLAIN_SHARE
        grouped = share if card.triton else share * PLAIN_EXPERTS
        found = replace(
            MEASURED,
            dense=MEASURED.dense * flops * share,
            grouped=MEASURED.grouped * flops * grouped,
            attention=tuple((n, rate * flops * share) for n, rate in MEASURED.attention),
            elementwise=MEASURED.elementwise * bytes_ * share,
            update=MEASURED.update * bytes_ * share,
            source=dict.fromkeys(MEASURED.source, "data sheet"),
        )
    found = replace(found, link=card.link * LINK_SHARE, network=card.network * LINK_SHARE)
    return calibrated_rates(found, calibrated) if calibrated else found


def calibrated_rates(found: CardRates, file: Mapping[str, Any]) -> CardRates:
    """The rates of a calibration file where it has them. Products by shape: the slowest of the larger half, as a step
    consists of many."""
    source = dict(found.source)
    changes: dict[str, Any] = {}
    for name in ("dense", "grouped"):
        shapes = sorted(file.get(name, ()), key=lambda row: row["flops"])
        if shapes:
            changes[name] = min(row["rate"] for row in shapes[len(shapes) // 2 :])
            source[name] = "measured"
    if file.get("attention"):
        changes["attention"] = tuple(sorted((int(r["length"]), float(r["rate"])) for r in file["attention"]))
        source["attention"] = "measured"
    for name, source_name in (
        ("elementwise", "elementwise"), ("update", "update"), ("layer_launch", "launch"), ("link", "link"),
        ("network", "network"), ("host", "host"),
    ):  # fmt: skip
        if file.get(name):
            changes[name] = float(file[name])
            source[source_name] = "measured"
    if "layer_launch" in changes:
        changes["expert_launch"] = changes["layer_launch"] * found.expert_launch / found.layer_launch
    return replace(found, **changes, source=source)
