"""Charts: round ticks, and names that cannot break out of the page."""

from __future__ import annotations

import json
import re

import pytest

from erniekit.track.charts import Series, line_chart, ticks
from erniekit.track.curves import Curve


def test_ticks_are_round_numbers_within_the_axis():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.0, 1e-5, 4) == pytest.approx([0, 2.5e-6, 5e-6, 7.5e-6, 1e-5])
    assert all(1.97 <= tick <= 8.41 for tick in ticks(1.97, 8.41, 4))


def test_a_series_name_cannot_end_the_script_that_holds_the_numbers():
    curve = Curve()
    curve.add(1, 2.0)
    name = "</script><b>"
    html = line_chart(name, [Series(name, curve), Series("other", curve, slot=2)])
    assert "<b>" not in html
    assert html.count("</script>") == 1
    numbers = html.split('<script type="application/json">')[1].split("</script>")[0]
    assert json.loads(numbers)["series"][0]["name"] == name


def test_the_numbers_of_an_axis_are_written_alike():
    """Of values around 0.001 some would be written as powers of ten, and some not."""
    curve = Curve()
    for step in (1, 2):
        curve.add(step, 1e-3)
    drawn = line_chart("rate", [Series("rate", curve)])
    shown = re.findall(r'text-anchor="end">([^<]+)</text>', drawn)[:-1]  # the last is "step"
    assert "1e-3" in shown
    assert all("e-" in text for text in shown), shown
