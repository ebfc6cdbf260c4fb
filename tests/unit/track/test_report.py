"""report.html: parses, stands alone, escapes whatever users put in a config, and draws what was logged."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from erniekit.track import make_trackers
from erniekit.track.report import write_report
from erniekit.track.runfile import RunRecord

NASTY = "</script><script>alert('x')</script> & \"quoted\" <img src=x onerror=alert(1)>"
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Fails on a tag closed out of order; keeps tags, attributes and text by element."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def count(self, tag, of_class=""):
        return sum(name == tag and of_class in (at.get("class") or "") for name, at in self.tags)

    def words(self):
        return " ".join(data for tag, data in self.text if tag not in ("script", "style"))


@pytest.fixture
def folder(tmp_path):
    record = RunRecord(tmp_path, command=["erniekit", "train", NASTY], version="0.1")
    config = [
        {"key": "model_name_or_path", "value": NASTY, "origin": NASTY},
        {"key": "learning_rate", "value": 1e-5, "origin": "run.yaml:3"},
        {"key": "seed", "value": 42, "origin": "default"},
    ]
    record.describe(
        config=config,
        notes=[{"key": "sequence_parallel", "old": True, "new": False, "reason": NASTY}],
        environment={"device": "H200", NASTY: NASTY},
        data={"rows": 12345, "sources": [{"path": NASTY, "rows": 5}], "sample": "two\nlines"},
        coverage=[{"module": "layers.*.attn.qkv", "matched": 18}],
    )
    trackers = make_trackers([], tmp_path, disable_tqdm=True, record=record)
    trackers.start(300)
    trackers.event(0, "start", NASTY)
    for step in range(1, 301):
        trackers.log(
            step,
            {
                "loss": 2 + math.exp(-step / 50),
                "learning_rate": 1e-5,
                "grad_norm": math.nan if step == 9 else 1.0,
                "tokens_per_second": 1234.5,
                "max_memory_allocated": 3.2,
                "rewards/margins</script>": step / 300,
            },
        )
        if step % 100 == 0:
            trackers.log(step, {"eval_loss": 2.5 - step / 1000}, "eval")
    trackers.log(300, {"train_loss": 2.1, "train_runtime": 3723.0}, "end")
    record.finish(next_commands=["erniekit chat out"])
    trackers.close()
    return tmp_path


def test_the_page_parses_and_shows_every_part(folder, capsys):
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Page(path.read_text())
    words = page.words()
    for part in ("Loss", "Learning rate", "Throughput", "Gradient norm", "Events", "Data", "Coverage", "Environment"):
        assert part in words
    for shown in ("12,345", "layers.*.attn.qkv", "H200", "run.yaml:3", "erniekit chat out", "1:02:03", "3.20"):
        assert shown in words
    assert page.count("svg") == 6, "four main charts, memory and the metric of another stage"
    assert page.count("path", "s2") == 1, "the evaluation's loss"
    assert page.count("tr", "default") == 1
    assert "1 logged value was not finite" in words


def test_nasty_text_is_text_wherever_it_comes_from(folder):
    html = write_report(folder).read_text()
    page = Page(html)
    assert NASTY in page.words()
    assert page.count("img") == 0
    assert html.count("<script") == 7, "six charts' numbers and the page's own script, nothing from the data"
    assert "alert('x')" not in "".join(data for tag, data in page.text if tag == "script")


def test_the_page_needs_nothing_from_anywhere(folder):
    html = write_report(folder).read_text()
    page = Page(html)
    assert not [at for _, at in page.tags if "src" in at or "href" in at]
    assert not re.search(r"url\(|@import|https?://|//cdn", html)
    assert "prefers-color-scheme: dark" in html


def test_the_numbers_behind_a_chart_are_those_logged(folder):
    page = Page(write_report(folder).read_text())
    numbers = json.loads(next(data for tag, data in page.text if tag == "script"))
    names = [series["name"] for series in numbers["series"]]
    assert names == ["train", "train, running mean", "evaluation"]
    assert numbers["series"][0]["steps"] == list(range(1, 301))
    assert numbers["series"][0]["values"][0] == pytest.approx(2 + math.exp(-1 / 50), abs=1e-5)  # 6 digits kept
    assert numbers["series"][2]["values"] == [2.4, 2.3, 2.2]


def test_a_long_run_stays_a_small_page_that_keeps_its_spike(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as out:
        for step in range(1, 20_001):
            out.write(json.dumps({"global_step": step, "loss": 77.0 if step == 12_345 else 2.0 + step % 7}) + "\n")
    html = write_report(tmp_path).read_text()
    numbers = json.loads(next(data for tag, data in Page(html).text if tag == "script"))
    raw = numbers["series"][0]
    assert len(raw["steps"]) <= 2000
    assert raw["values"][raw["steps"].index(12_345)] == 77.0
    assert len(html) < 300_000


def test_a_folder_without_files_still_gives_a_page_that_says_so(tmp_path):
    words = Page(write_report(tmp_path).read_text()).words()
    assert "run.json is missing" in words
    assert "No step was logged" in words


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1e-12]])
def test_flat_and_single_point_curves_are_drawn(values, tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as out:
        for step, value in enumerate(values, start=1):
            out.write(json.dumps({"global_step": step, "loss": value, "learning_rate": value}) + "\n")
    html = write_report(tmp_path).read_text()
    assert Page(html).count("svg") == 2
    assert "nan" not in html.split("<svg", 1)[1].split("</svg>")[0]
