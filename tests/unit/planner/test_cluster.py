"""Words and files that name a cluster, and what a person reads when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.errors import ConfigError
from erniekit.planner.cards import CARDS, GIB, calibrated_rates, rates_of
from erniekit.planner.cluster import parse


@pytest.mark.parametrize(
    ("words", "machines", "devices", "name", "gib"),
    [
        ("8x80G", 1, 8, "80G", 79.3),
        ("2x8xH200-141G", 2, 8, "H200", 139.8),
        ("16xBI150-32G", 2, 8, "BI150", 32),
        ("128xAscend-64G", 16, 8, "Ascend", 64),
        ("6xA100", 1, 6, "A100", 79.3),
        ("1x4xh100-80gib", 1, 4, "H100", 79.3),
        ("252x8xH200", 252, 8, "H200", 139.8),
    ],
)
def test_words_name_machines_devices_and_a_card(words: str, machines: int, devices: int, name: str, gib: float) -> None:
    (island,) = parse(words).islands
    assert (island.machines, island.devices, island.card.name) == (machines, devices, name)
    assert island.card.memory == pytest.approx(gib * GIB)


@pytest.mark.parametrize("words", ["", "H200", "0x80G", "8x0G", "x8", "8xH2O-80G", "0x8xH200", "8x-80G"])
def test_what_is_no_cluster_is_refused_with_what_would_be(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    lines = caught.value.lines()
    assert len(lines) == 3
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("8x80", "did you mean 8x80G?"),
        ("8x80G80G", "did you mean 8x80G?"),
        ("2x8x141-141G", "did you mean 2x8x141G?"),
        ("8x40.5g.", "did you mean 8x40.5G?"),
        ("8xFoo-80G", "give its memory alone, 8x80G, or one of: "),
        ("8xAscent-64G", "did you mean 8xAscend? Otherwise give its memory alone, 8x64G, or one of: "),
    ],
)
def test_a_card_that_is_none_is_told_what_was_meant(words: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("count", ["1.5", "2.0", "-1", "two"])
def test_machines_are_a_whole_number(count: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(f"islands: [{{card: H200, machines: {count}}}]")
    with pytest.raises(ConfigError) as caught:
        parse(str(file))
    assert caught.value.fix == "machines: a whole number above 0"


def test_more_devices_than_are_planned_are_refused_however_they_are_given(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("islands: [60000x80G, {card: H200, machines: 50000}]")
    for words in ("1000000x80G", "20000x8xH200", str(file)):
        with pytest.raises(ConfigError, match="beyond what is planned: 100,000"):
            parse(words)
    assert parse("12500x8xH200").size == 100_000


@pytest.mark.parametrize("size", ["9" * 20, "99999", "9" * 400, "0.0"])
def test_a_memory_that_no_card_has_is_refused(size: str) -> None:
    with pytest.raises(ConfigError):
        parse(f"8x{size}G")


@pytest.mark.parametrize("words", ["8x0G", "2x8x0", "8x0.0G", "8x99999G", "8x0-80G", "8x1.12345678901G"])
def test_a_memory_is_not_refused_with_the_advice_to_give_it(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert caught.value.fix.startswith("write 8x80G, ")
    outside = "no memory of a card: more than 0 and at most 10,000 GiB" in str(caught.value)
    assert outside is (words != "8x1.12345678901G")


def test_a_mistyped_card_is_told_its_nearest() -> None:
    with pytest.raises(ConfigError, match="H220") as caught:
        parse("8xH220-141G")
    assert "H200" in caught.value.fix


def test_a_file_lists_unlike_islands(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text("between_gb: 3\nislands:\n- 8xH200-141G\n- {card: BI150, machines: 2, devices: 16, tflops: 90}\n")
    cluster = parse(str(file))
    assert cluster.size == 8 + 32
    assert cluster.between == 3e9
    assert cluster.islands[1].card.flops == 90e12
    assert cluster.islands[1].card.memory == CARDS["bi150"].memory


@pytest.mark.parametrize(
    "text",
    [
        "a: [", "islands: []", "- 8x80G", "islands: [{machines: 2}]", "islands: [{card: H200, devices: 0}]",
        "islands: [{card: H200, devices: true}]", "islands: [{card: H200, speed: 3}]",
        "between_gb: no\nislands: [8x80G]", "islands: [8x]", "islands: [{card: H200, tflops: .nan}]",
        "islands: [{card: H200, memory_gib: .inf}]", "between_gb: .inf\nislands: [8x80G]",
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(str(file))
    assert len(caught.value.lines()) == 3
    assert "cluster.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no file"):
        parse("nowhere.yaml")


def test_rates_are_marked_by_where_they_are_from_and_a_calibration_takes_their_place() -> None:
    ours, theirs = rates_of(CARDS["h200"]), rates_of(CARDS["ascend"])
    assert ours.source["dense"] == "measured"
    assert set(theirs.source.values()) == {"data sheet"}
    assert theirs.dense < CARDS["ascend"].flops
    rows = [{"flops": f, "rate": r} for f, r in ((1e9, 1e12), (1e12, 5e13), (2e12, 4e13))]
    made = calibrated_rates(theirs, {"dense": rows, "attention": [{"length": 8192, "rate": 3e13}], "link": 7e9})
    assert made.dense == 4e13, "small shapes are left out, the slowest of the others counts"
    assert made.attention_at(100) == made.attention_at(1e6) == 3e13
    assert made.link == 7e9
    assert made.source["dense"] == made.source["link"] == "measured"
    assert made.source["grouped"] == "data sheet"


def test_attention_between_two_lengths_is_between_their_rates() -> None:
    rates = rates_of(CARDS["h200"])
    low, middle, high = (rates.attention_at(n) for n in (1024, 2048, 4096))
    assert low < middle < high
