"""The picture of a step: what stands where, as text and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from erniekit.rehearse.calls import Call, RankGroup
from erniekit.rehearse.timeline_picture import as_svg, as_text
from erniekit.rehearse.timing import RankTimes, TimeSpan

PAIR = RankGroup((0, 1))
GATHER = TimeSpan(0, 4, "all_gather", Call("all_gather", PAIR, (8,), "bfloat16", source="<here>.py:1"))
# Computes from 2 to 6 of 10 seconds; a gather that is half hidden, a short sum at the end.
RANK = RankTimes(
    3,
    10.0,
    [TimeSpan(2, 6)],
    [GATHER, TimeSpan(9.9, 10, "all_reduce", Call("all_reduce", PAIR, (), "float32", source="b.py:2"))],
)


def test_text_has_two_lines_for_each_rank() -> None:
    upper, below, *legend = as_text([RANK], width=52)
    assert upper == f"rank 3      {'.' * 8}{'#' * 16}{'.' * 16}"
    assert below == f"{'':<11} {'G' * 16}{'.' * 23}r"
    assert "G all_gather, R all_reduce" in legend[-1]


def test_the_legend_has_the_marks_that_are_drawn() -> None:
    hidden = RankTimes(0, 10.0, [], [GATHER, TimeSpan(1, 1.0001, "broadcast")])
    assert "transfers: G all_gather;" in as_text([hidden])[-1]


def test_svg_is_one_document_whose_boxes_say_what_they_are() -> None:
    picture = as_svg([RANK, RankTimes(4, 10.0)])
    root = ElementTree.fromstring(picture)
    told = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "computes: 2000 to 6000 ms" in told
    assert "all_gather bfloat16 [8] at <here>.py:1: 0 to 4000 ms, 50% of it hidden" in told
    assert "does not compute: 0 to 1e+04 ms" in told, "the rank that does nothing"
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["rank 3", "rank 4"]
    assert "all_gather" in texts


def test_boxes_that_cannot_be_seen_are_not_drawn_one_by_one() -> None:
    many = [TimeSpan(k * 1e-5, k * 1e-5 + 1e-6, "all_reduce") for k in range(10_000)]
    assert as_svg([RankTimes(0, 10.0, [], many)]).count("<rect") < 200


def test_a_step_without_anything_is_drawn() -> None:
    ElementTree.fromstring(as_svg([RankTimes(0, 0.0)]))
    assert "transfers: none" in as_text([RankTimes(0, 0.0)])[-1]
