"""The page in a real Chromium: a person uploads, names, opens and compares runs, trains, watches and stops, and reads
every tab in Chinese. test_webui_flow.py goes through all of it, in both languages, and deletes, in `make test-full`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from erniekit.webui.app import HOME
from support.browsing import Hands, WebUI, chromium, why_not
from support.webui_room import TABS, end_jobs, make_room

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is here"),
    pytest.mark.xdist_group("webui"),
]
STEPS = 5000  # more than are watched: the run is stopped once its curve has moved
SENTENCE = re.compile(r"[A-Za-z][a-z']+,? [a-z']{2,},? [a-z']{2,}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("my-models", numbered=False)
    make_room(folder)
    yield folder
    end_jobs(folder)


@pytest.fixture(scope="module")
def webui(folder: Path) -> Iterator[WebUI]:
    running = WebUI(folder, "--runs", str(folder.parent / "others"))
    yield running
    running.close()


def test_a_person_uploads_trains_and_reads_the_log_names_opens_and_compares_runs_in_both_languages(
    webui: WebUI, folder: Path, tmp_path: Path
) -> None:
    with chromium() as context:
        hands = Hands(context, webui.url)
        upload(hands, folder, tmp_path)
        name_open_and_compare(hands, folder)  # before a run takes a core and has the list drawn again and again
        hands.tab("Train")
        hands.press("train-start")
        hands.tab("Runs")
        hands.see("#runs-table .ek-pill.running")
        hands.tab("Train")
        watch_and_stop(hands)
        follow_the_log(hands)
        read_in_chinese(hands)
        assert not hands.faults
        ours = urlsplit(webui.url).netloc
        assert not [url for url in hands.asked if urlsplit(url).netloc not in (ours, "")], "the page asked elsewhere"


def upload(hands: Hands, folder: Path, tmp_path: Path) -> None:
    """One's own recipe and data go into the form, and are kept; an adapter is not offered as a base."""
    mine = {
        "model_name_or_path": "demo/model", "fine_tuning": "Full", "learning_rate": 6e-3, "max_steps": STEPS,
        "compute_type": "fp32", "device": "cpu", "max_seq_len": 512,
        "adam_beta1": 0.85,  # has no field of its own
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    hands.upload("train-load", tmp_path / "mine.yaml")
    hands.until(lambda: "adam_beta1" in hands.text("#train-yaml"), 150, "the uploaded recipe in the form")
    assert (folder / HOME / "recipes" / "mine.yaml").is_file()
    rows = (folder / "demo" / "data" / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    messy = "\ufeff" + "\r\n".join([rows[0], "", *rows[1:]])  # as an editor of another system saves it
    (tmp_path / "我的 rows.jsonl").write_bytes(messy.encode())
    hands.upload("train-upload", tmp_path / "我的 rows.jsonl")
    hands.until(lambda: "data/我的-rows.jsonl" in hands.text("#train-yaml"), 150, "the uploaded data in the form")
    assert (folder / HOME / "data" / "我的-rows.jsonl").is_file()
    hands.page.locator("#train-model_name_or_path input").click()
    offered = hands.page.locator("ul[role=listbox] li").all_inner_texts()
    assert any("demo/model" in name for name in offered)
    assert not any("adapter" in name for name in offered), "an adapter is no base"
    hands.page.keyboard.press("Escape")
    hands.until(lambda: "ek-good" in hands.page.inner_html("#train-problems"), 150, "a form that is ready")


def watch_and_stop(hands: Hands) -> None:
    """The curve moves, the time left is told; stopped, the run can be resumed."""
    shapes: set[str] = set()

    def moved() -> bool:
        shapes.add(hands.curve())
        return len(shapes - {""}) >= 2

    hands.until(moved, 150, "a curve that moves while it is watched")
    assert "time left" in hands.text("#train-status")
    hands.press("train-stop")
    hands.until(lambda: hands.state() == "stopped", 90, "a run that stopped")
    assert 2 <= hands.step() < STEPS
    hands.see("#train-resume")


def follow_the_log(hands: Hands) -> None:
    """At its end after every new line, unless it was scrolled up."""
    log = hands.page.locator("#train-log .ek-log")
    assert log.evaluate("log => log.scrollHeight > log.clientHeight"), "too short a log to follow"
    hands.until(lambda: hands.log_gap() < 5, 10, "the end of the log")
    log.evaluate("log => { log.scrollTop = 0; }")
    hands.page.wait_for_timeout(100)
    grown = "log => { log.textContent += 'one more line\\n'; }"
    log.evaluate(grown)
    hands.page.wait_for_timeout(100)
    assert hands.log_gap() > 5, "a person was reading further up"
    log.evaluate("log => { log.scrollTop = log.scrollHeight; }")
    hands.page.wait_for_timeout(100)
    log.evaluate(grown)
    hands.until(lambda: hands.log_gap() < 5, 10, "the end again")


def name_open_and_compare(hands: Hands, folder: Path) -> None:
    """Runs of another folder: named, opened with their samples, compared."""
    others = folder.parent / "others"
    hands.tab("Runs")
    hands.open("others/first")
    assert hands.step("runs") == 30
    samples = hands.see("#runs-samples .ek-sample")
    assert "<b>4</b>" in samples.inner_text(), "HTML of the model's own is text"
    assert not samples.get_by_text("easy").is_visible(), "the thought is folded"
    samples.locator("summary").first.click()
    assert samples.get_by_text("easy").is_visible()
    hands.type("runs-name", "slow rate")
    hands.press("runs-rename")
    hands.see("#runs-table .ek-open:has-text('slow rate')")
    assert json.loads((folder / HOME / "names.json").read_text()) == {str(others / "first"): "slow rate"}
    assert (others / "first" / "run.json").is_file(), "no folder was moved"
    hands.tick("slow rate")
    hands.tick("others/second")
    hands.press("runs-compare")
    hands.see("#runs-compared .chart")
    assert hands.page.locator("#runs-compared .chart").first.locator("path[class^=s]").count() == 2
    rows = hands.page.locator("#runs-compared tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["learning_rate", "0.001", "0.002"]], "the settings that differ"


def read_in_chinese(hands: Hands) -> None:
    """Every tab: Chinese words, and no English sentence."""
    hands.choose("ek-lang", "中文")
    hands.until(lambda: hands.page.get_by_role("tab", name="训练", exact=True).count(), 150, "Chinese tabs")
    for tab in TABS["zh"]:
        hands.tab(tab)
        hands.page.wait_for_timeout(400)
        words = hands.words()
        assert len([text for text in words if re.search("[\u4e00-\u9fff]", text)]) > 10, words
        english = [text for text in words if SENTENCE.search(text)]
        assert not english, f"{tab}: {english}"
