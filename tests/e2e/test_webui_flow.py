"""All that a person does on the page, in a real Chromium and in either language: a run outlives its page, is stopped,
resumed, and its settings reused for a short one, which is evaluated, adapted with samples, asked, merged, split and
compared; an evaluation is deleted; a messy file is uploaded; chat models leave memory with tab and page.

`make test-full` keeps the pictures that the README shows, and those of every tab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.webui.app import HOME
from erniekit.webui.jobs import Jobs, WebJob
from erniekit.webui.paths import Roots
from support.browsing import Hands, WebUI, another_browser, chromium, why_not
from support.clock import until
from support.jsonl import write_jsonl
from support.webui_room import TABS, album, end_jobs, kept_pictures, make_room

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is here"),
    pytest.mark.xdist_group("webui"),
    pytest.mark.full,
]
LONG = 20_000  # never reached: the run is stopped, resumed and stopped again
BASE_STEPS = 60
STYLE_STEPS = 90
THOUGHT, ANSWER = "The question is about me.", "I am a tiny ERNIE."
QUESTIONS = ("Who are you?", "你是谁？")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "my-models"
    make_room(folder)
    answer = {"role": "assistant", "reasoning_content": THOUGHT, "content": ANSWER}
    rows = [{"messages": [{"role": "user", "content": question}, answer]} for question in QUESTIONS]
    write_jsonl(folder / "demo" / "data" / "thoughts.jsonl", rows)
    yield folder
    end_jobs(folder)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_run_outlives_the_page_is_stopped_resumed_reused_evaluated_adapted_asked_merged_and_compared(
    folder: Path, tmp_path: Path, lang: str
) -> None:
    pictures = kept_pictures(tmp_path) if lang == "en" else tmp_path
    first = WebUI(folder, f"lang={lang}")
    try:
        with chromium() as context:
            hands = Hands(context, first.url, lang)
            pick_a_recipe(hands)
            choose_stages(hands)
            start(hands)
            hands.page.close()
            again = Hands(context, first.url, lang)  # the page was closed; the run was not
            again.pane(again.word("train.pane.live"))
            again.until(lambda: again.step() >= 15, 150, "the run, shown to the browser that started it")
            assert again.word("tile.left") in again.text("#train-status")
    finally:
        first.close()  # nor when the page's program ends

    second = WebUI(folder, f"lang={lang}", "--runs", str(folder.parent / "others"))
    try:
        with chromium() as context:
            hands = Hands(context, second.url, lang)
            stop_and_resume(hands)
            reuse_settings(hands)
            upload_messy_data(hands, tmp_path, folder)
            evaluate_and_delete(hands, folder)
            adapt(hands, tmp_path, pictures)
            merge_and_split(hands)
            name_and_compare(hands, folder, pictures)
            ask(hands, pictures)
            server = close_the_tab(hands, folder)
            with another_browser(context) as other:  # meanwhile; the first one's own tabs would keep the model loaded
                look_at_all_tabs(other, second.url, lang, album(kept_pictures(tmp_path)))
            until(lambda: not memory_kib(server.pid), seconds=90)
            until(lambda: Jobs(folder / HOME, Roots([folder])).get(server.id).state == "stopped")
            server = load_again(context, second.url, lang, folder)
            faults = hands.faults
    finally:
        second.close()
    assert not memory_kib(server.pid), "the page has stopped, and its model is still in memory"
    assert not faults
    assert (folder / "output" / "style" / "export" / "config.json").is_file()


def pick_a_recipe(hands: Hands) -> None:
    hands.pick("train-recipe", "ERNIE-4.5-0.3B/sft/run_sft_lora_8k")
    hands.until(lambda: "ERNIE-4.5-0.3B-Paddle" in hands.text("#train-yaml"), 150, "a shipped recipe in the form")
    hands.press("train-clear")
    hands.until(lambda: "ERNIE-4.5-0.3B-Paddle" not in hands.text("#train-yaml"), 60, "an empty form")


def choose_stages(hands: Hands) -> None:
    """A stage shows the keys it reads, and a row of its data."""
    for stage, drawer, hidden, row in (
        ("KTO", "preferences", "#train-teacher_model_name_or_path", "completion"),
        ("CLS", "classes", "#train-teacher_model_name_or_path", "label"),
        ("SFT", "distill", "#train-class_labels", "messages"),
    ):
        hands.choose("train-stage", hands.word(f"stage.{stage.lower()}"))
        hands.until(lambda row=row: row in hands.text("#train-stage-hint"), 60, "a row of the stage's data")  # type: ignore[misc]
        hands.until(lambda stage=stage: f"stage: {stage}" in hands.text("#train-yaml"), 60, "the stage in the recipe")  # type: ignore[misc]
        title = hands.word(f"train.drawer.{drawer}")
        hands.page.get_by_role("button", name=re.compile(rf"^{title}(\W|$)")).first.wait_for()
        assert not hands.page.locator(hidden).is_visible()
        whole = stage == "CLS"  # trains every weight unless adapters are chosen, and the form shows it
        hands.until(lambda whole=whole: ("fine_tuning: Full" in hands.text("#train-yaml")) == whole, 60, stage)  # type: ignore[misc]


def start(hands: Hands) -> None:
    """The demo's own run, all weights."""
    hands.pick("train-model_name_or_path", "demo/model")
    hands.pick("train-train_dataset_path", "demo/data/sft.jsonl")
    hands.pick("train-compute_type", "fp32")
    hands.pick("train-device", "cpu")
    hands.type("train-max_steps", str(LONG))
    hands.type("train-max_seq_len", "512")
    hands.choose("train-fine_tuning", "Full")
    hands.type("train-learning_rate", "6e-3")
    hands.type("train-output_dir", "output/long")
    hands.until(lambda: "output/long" in hands.text("#train-yaml"), 60, "a recipe that says what the form does")
    hands.until(lambda: "ek-good" in hands.page.inner_html("#train-problems"), 150, "a form that is ready")
    hands.press("train-start")
    hands.until(lambda: hands.step() >= 5, 150, "five steps")


def stop_and_resume(hands: Hands) -> None:
    hands.tab(hands.word("tab.runs"))
    hands.see("#runs-table .ek-pill.running")
    hands.open("output/long")
    hands.until(lambda: hands.step("runs") >= 15, 150, "the run found again")
    stop(hands)
    stopped = hands.step("runs")
    assert 15 <= stopped < LONG
    hands.act("output/long", hands.word("runs.resume"))
    hands.until(lambda: hands.state("runs") == "running", 150, "a run that goes on")
    hands.until(lambda: hands.step("runs") > stopped, 150, "steps after the resume")
    assert "resum" in hands.text("#runs-log").lower()
    stop(hands)


def stop(hands: Hands) -> None:
    hands.press("runs-stop")
    hands.until(lambda: hands.state("runs") == "stopped", 150, "a run that stopped")


def reuse_settings(hands: Hands) -> None:
    """The settings of the stopped run for one that ends soon."""
    hands.press("runs-again")
    hands.until(lambda: f"max_steps: {LONG}" in hands.text("#train-yaml"), 150, "the settings of the run in the form")
    assert "output_dir" not in hands.text("#train-yaml"), "a new run does not go into the folder of the old one"
    hands.type("train-max_steps", str(BASE_STEPS))
    hands.type("train-output_dir", "output/base")
    hands.until(lambda: "output/base" in hands.text("#train-yaml"), 60, "the new folder in the recipe")
    hands.press("train-start")
    hands.until(lambda: hands.state() == "running", 150, "the new run")
    end(hands)
    assert hands.step() == BASE_STEPS


def end(hands: Hands, watch: str = "train", seconds: float = 240) -> None:
    hands.until(lambda: hands.state(watch) not in ("", "running"), seconds, "the end of the run")
    assert hands.state(watch) == "ended", hands.text(f"#{watch}-log")


def upload_messy_data(hands: Hands, tmp_path: Path, folder: Path) -> None:
    """A file as people have them: marks of another system, a blank line, a broken one, a field that nothing reads."""
    name = "my rows (1).jsonl"
    good = json.dumps({"src": ["2 + 2?"], "tgt": ["4"], "note": "mine"})
    (tmp_path / name).write_bytes(("\ufeff" + good + "\r\n\r\n{broken\r\n" + good).encode())
    hands.pane(hands.word("train.pane.recipe"))
    hands.press("train-clear")
    hands.until(lambda: "output/base" not in hands.text("#train-yaml"), 60, "an empty form")
    hands.upload("train-upload", tmp_path / name)
    hands.until(lambda: "data/my-rows-1-.jsonl" in hands.text("#train-yaml"), 150, "the uploaded data in the form")
    hands.pick("train-model_name_or_path", "demo/model")
    hands.press("train-preview")
    hands.see("#train-data mark")
    assert hands.page.locator("#train-data .ek-sample").count() == 3
    assert hands.page.locator("#train-data .bad-row").count() == 1, hands.text("#train-data")
    assert (folder / HOME / "data" / "my-rows-1-.jsonl").stat().st_mode & 0o777 == 0o600


def evaluate_and_delete(hands: Hands, folder: Path) -> None:
    """An evaluation has its results in its own folder, and goes with it; the model it evaluated stays."""
    hands.tab(hands.word("tab.evaluate"))
    hands.pick("evaluate-model_name_or_path", "output/base")
    hands.pick("evaluate-eval_dataset_path", "demo/data/persona.jsonl")
    hands.pick("evaluate-compute_type", "fp32")
    hands.type("evaluate-max_seq_len", "512")
    hands.press("evaluate-start")
    hands.until(lambda: hands.state("evaluate") == "ended", 150, "an evaluation")
    assert hands.word("tile.eval_loss") in hands.text("#evaluate-status")
    (job,) = [job for job in Jobs(folder / HOME, Roots([folder])).list() if job.command == "eval"]
    hands.tab(hands.word("tab.runs"))
    row = hands.page.locator(f'#runs-table tr[data-row="{job.id}"]')
    row.locator(".ek-open").click()
    hands.until(lambda: hands.state("runs") == "ended", 60, "the evaluation opened")
    hands.press("runs-delete")  # and the question is answered with yes
    hands.until(lambda: not row.count(), 60, "a list without the evaluation")
    assert not Path(job.folder).exists()
    assert (folder / "output" / "base" / "config.json").is_file()


def adapt(hands: Hands, tmp_path: Path, pictures: Path) -> None:
    """A recipe from a file; an adapter on the run before, with samples of its answers; the picture of a running job."""
    path = tmp_path / "style.yaml"
    values = {
        "model_name_or_path": "output/base",
        "train_dataset_path": "demo/data/thoughts.jsonl",
        "eval_dataset_path": "demo/data/thoughts.jsonl",
        "output_dir": "output/style",
        "learning_rate": 2e-2,
        "max_steps": STYLE_STEPS,
        "eval_steps": STYLE_STEPS // 3,
        "evaluation_strategy": "steps",
        "eval_generate": 2,
        "eval_generate_max_tokens": 40,
        "compute_type": "fp32",
        "device": "cpu",
        "max_seq_len": 512,
        "adam_beta1": 0.85,  # has no field of its own
    }
    path.write_text(yaml.safe_dump(values))
    hands.tab(hands.word("tab.train"))
    hands.pane(hands.word("train.pane.recipe"))
    hands.upload("train-load", path)
    hands.until(lambda: "adam_beta1" in hands.text("#train-yaml"), 150, "the recipe in the form")
    recipe = hands.download("train-download", tmp_path / "again.yaml")
    assert recipe["adam_beta1"] == 0.85
    assert recipe["learning_rate"] == 2e-2
    hands.press("train-doctor")
    hands.until(lambda: "ok" in hands.text("#train-report").lower(), 150, "the doctor's report")
    hands.press("train-preview")
    hands.see("#train-data mark")
    hands.press("train-start")
    hands.until(lambda: hands.step() >= STYLE_STEPS // 3 + 10, 150, "steps after an evaluation")
    hands.see("#train-samples .ek-sample")
    hands.picture(pictures / "webui-train.png")
    end(hands)
    sample = hands.page.locator("#train-samples .ek-sample").first
    assert QUESTIONS[0] in sample.inner_text()
    assert hands.word("watch.expected") in sample.inner_text()
    assert not sample.get_by_text(THOUGHT).first.is_visible(), "the thought is folded"


def ask(hands: Hands, pictures: Path) -> None:
    """A reasoning model: what it thinks is folded above its answer, and is not part of it."""
    hands.tab(hands.word("tab.runs"))
    hands.act("output/style", hands.word("runs.chat"))  # its base and its adapter go into the form, and are loaded
    hands.see('#chat-status [data-ready="1"]', 120)
    hands.drawer(hands.word("chat.sampling"))
    hands.type("chat-temperature", "0")
    ask_once(hands, QUESTIONS[0])
    window = hands.page.locator("#chat-window")
    answer = window.locator(".bot").last
    hands.until(lambda: ANSWER in answer.inner_text(), 150, "what it was taught")
    title = window.get_by_text(hands.word("chat.thinking"), exact=True)
    title.wait_for()
    thought = window.get_by_text(THOUGHT)
    if not thought.is_visible():
        title.click()
        thought.wait_for()
    assert "think>" not in window.inner_text()
    hands.page.wait_for_timeout(500)
    hands.picture(pictures / "webui-chat.png")
    ask_once(hands, QUESTIONS[1])


def ask_once(hands: Hands, question: str) -> None:
    answers = hands.page.locator("#chat-window .bot").count()
    hands.type("chat-message", question)
    hands.press("chat-send")
    hands.until(lambda: hands.page.locator("#chat-window .bot").count() > answers, 150, "an answer")


def merge_and_split(hands: Hands) -> None:
    hands.tab(hands.word("tab.runs"))
    hands.act("output/style", hands.word("runs.merge"))
    hands.until(lambda: "output/style" in hands.text("#export-yaml"), 150, "the run in the form")
    hands.press("export-start")
    hands.until(lambda: hands.state("export") == "ended", 150, "a merge")
    hands.tab(hands.word("export.split"))
    hands.pick("split-output_dir", "output/style/export")
    hands.press("split-start")
    hands.until(lambda: hands.state("split") == "ended", 150, "a split")


def name_and_compare(hands: Hands, folder: Path, pictures: Path) -> None:
    """One of these runs and one of another folder, which is given a name."""
    hands.tab(hands.word("tab.runs"))
    hands.open("others/first")
    hands.type("runs-name", "older rate 较早")
    hands.press("runs-rename")
    hands.see("#runs-table .ek-open:has-text('older rate 较早')")
    names = json.loads((folder / HOME / "names.json").read_text(encoding="utf-8"))
    assert names == {str(folder.parent / "others" / "first"): "older rate 较早"}
    for run in ("output/style", "output/base", "older rate 较早"):
        hands.tick(run)
    hands.press("runs-compare")
    hands.until(lambda: hands.page.locator("#runs-compared .chart").count() >= 3, 150, "charts of all")
    assert hands.page.locator("#runs-compared .chart").first.locator("path[class^=s]").count() == 3
    assert "learning_rate" in hands.text("#runs-compared")
    hands.picture(album(pictures) / "webui-compare.png")


def close_the_tab(hands: Hands, folder: Path) -> WebJob:
    """A chat model goes with its tab: its process ends, and so its memory is free."""
    server = running_server(folder)
    assert memory_kib(server.pid) > 50_000, "a model is loaded"
    hands.page.close()
    return server


def load_again(context: Any, url: str, lang: str, folder: Path) -> WebJob:
    """Loaded and unloaded by the buttons, then one that is loaded when the page stops."""
    hands = Hands(context, url, lang)
    hands.tab(hands.word("tab.runs"))
    hands.act("output/base", hands.word("runs.chat"))
    hands.see('#chat-status [data-ready="1"]', 120)
    server = running_server(folder)
    hands.press("chat-unload")
    hands.until(lambda: hands.word("chat.not_loaded") in hands.text("#chat-status"), 60, "an unloaded model")
    until(lambda: not memory_kib(server.pid), seconds=60)
    hands.press("chat-load")
    hands.see('#chat-status [data-ready="1"]', 120)
    server = running_server(folder)
    assert memory_kib(server.pid) > 50_000, "a model is loaded"
    return server


def running_server(folder: Path) -> WebJob:
    jobs = Jobs(folder / HOME, Roots([folder]))
    (server,) = [job for job in jobs.list() if job.command == "server" and job.is_running]
    return server


def memory_kib(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def look_at_all_tabs(context: Any, url: str, lang: str, pictures: Path) -> None:
    """Pictures of every tab, wide and narrow; nothing is wider than a phone."""
    hands = Hands(context, url, lang)
    for width, name_of in ((1440, "webui-{}-{}.png"), (390, "webui-{}-{}-phone.png")):
        hands.page.set_viewport_size({"width": width, "height": 900})
        for name, tab in zip(TABS["en"], TABS[lang]):
            hands.tab(tab)
            hands.page.wait_for_timeout(500)
            hands.picture(pictures / name_of.format(name.lower(), lang))
            assert hands.page.evaluate("document.documentElement.scrollWidth") <= width + 2, f"{tab} is too wide"
    hands.page.close()
