"""The page in a real Chromium: a person previews data, trains and watches, stops, resumes, chats, merges, downloads.

`make test-full` keeps the pictures the README shows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from erniekit.demo.tiny import make_tiny_model
from erniekit.webui.app import HOME
from erniekit.webui.jobs import Jobs
from erniekit.webui.paths import Roots
from support.browsing import Hands, WebUI, chromium, until, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is here"),
    pytest.mark.xdist_group("webui"),
]
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "erniekit" / "demo" / "data"
STEPS = 60
LONG = 1000  # still running when a second page has started, on a busy machine too
SENTENCE = re.compile(r"[A-Za-z][a-z']+,? [a-z']{2,},? [a-z']{2,}")
TABS = {"en": ("Train", "Runs", "Evaluate", "Chat", "Export"), "zh": ("训练", "运行记录", "评估", "对话", "导出")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo's model and data. Jobs outlive their page, so what a failed test left running is ended here."""
    folder = tmp_path_factory.mktemp("my-models", numbered=False)
    make_tiny_model(folder / "demo" / "model")
    (folder / "demo" / "data").mkdir()
    rows = (DEMO / "sft-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "demo" / "data" / "sft.jsonl").write_text("".join(rows[:40]), encoding="utf-8")
    shutil.copyfile(DEMO / "persona.jsonl", folder / "demo" / "data" / "persona.jsonl")
    write_run(folder.parent / "others" / "first", 1e-3)
    write_run(folder.parent / "others" / "second", 2e-3)
    (folder / "demo" / "adapter").mkdir()
    (folder / "demo" / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "demo/model"}')
    (folder / "demo" / "adapter" / "adapter_model.safetensors").touch()
    yield folder
    jobs = Jobs(folder / HOME, Roots([folder]))
    for job in jobs.list():
        jobs.stop(job.id, force=True)


def write_run(folder: Path, rate: float) -> None:
    """An adapter's run of another terminal, as training leaves it, with samples of an evaluation."""
    folder.mkdir(parents=True)
    given = {"model_name_or_path": "demo/model", "learning_rate": rate, "max_steps": 30}
    config = [{"key": key, "value": value, "origin": "key=value"} for key, value in given.items()]
    times = {"started": "2026-11-17T09:00:00+00:00", "finished": "2026-11-17T09:01:00+00:00"}
    (folder / "run.json").write_text(json.dumps({"status": "finished", "total_steps": 30, "config": config, **times}))
    steps = [{"global_step": n, "loss": 50 * rate + 3.0 / n, "learning_rate": rate} for n in range(1, 31)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    sample = {"global_step": 30, "prompt": "2 + 2?", "answer": "<think>easy</think><b>4</b>", "reference": "4"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "demo/model"}')
    (folder / "adapter_model.safetensors").touch()


@pytest.fixture(scope="module")
def webui(folder: Path) -> Iterator[WebUI]:
    running = WebUI(folder, "--runs", str(folder.parent / "others"))
    yield running
    running.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: beside the docs when `make test-full` asks for it."""
    kept = ROOT / "docs" / "images" if os.environ.get("FAULT_TABLE") == "1" else tmp_path
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def fill_in(hands: Hands, steps: int, model: str = "demo/model", data: str = "demo/data/sft.jsonl") -> None:
    """The demo's own run."""
    hands.pick("train-model_name_or_path", model)
    hands.pick("train-train_dataset_path", data)
    hands.pick("train-compute_type", "fp32")
    hands.pick("train-device", "cpu")
    hands.type("train-max_steps", str(steps))
    hands.type("train-max_seq_len", "512")
    hands.until(lambda: "ek-good" in hands.page.inner_html("#train-problems"), 150, "a form that is ready")
    hands.until(lambda: "device: cpu" in hands.text("#train-yaml"), 20, "a recipe that says what the form does")


def learn(hands: Hands, watch: str = "train", seconds: float = 240) -> list[str]:
    """Watch a run to its end; every shape its loss curve had on the way."""
    shapes: list[str] = []

    def over() -> bool:
        if (shape := hands.curve(watch)) and shape not in shapes:
            shapes.append(shape)
        return hands.state(watch) not in ("", "running")

    hands.until(over, seconds, "the end of the run")
    assert hands.state(watch) == "ended", hands.text(f"#{watch}-log")
    return shapes


def download(hands: Hands, path: Path) -> dict[str, object]:
    with hands.page.expect_download() as download:
        hands.press("train-download")
    download.value.save_as(path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_a_person_uploads_trains_and_reads_the_log_names_opens_and_compares_runs_in_both_languages(
    webui: WebUI, folder: Path, tmp_path: Path
) -> None:
    with chromium() as context:
        hands = Hands(context, webui.url)
        upload_and_pick(hands, folder, tmp_path)
        hands.press("train-start")
        hands.see("#train-curves .chart")
        shapes = learn(hands)
        assert hands.step() == STEPS
        assert len(shapes) >= 2, "the curve did not move while it was watched"
        follow_the_log(hands)
        hands.pane("Recipe")
        recipe = download(hands, tmp_path / "recipe.yaml")
        assert recipe["train_dataset_path"] == [f"{HOME}/data/mine.jsonl"]
        assert (recipe["learning_rate"], recipe["adam_beta1"], recipe["max_steps"]) == (6e-3, 0.85, STEPS)
        name_open_and_compare(hands, folder)
        merge_from_the_list(hands)
        read_in_chinese(hands)
        assert not hands.faults
        ours = urlsplit(webui.url).netloc
        assert not [url for url in hands.asked if urlsplit(url).netloc not in (ours, "")], "the page asked elsewhere"


def upload_and_pick(hands: Hands, folder: Path, tmp_path: Path) -> None:
    """A shipped recipe into the form; then one's own, uploaded; then one's own data."""
    hands.pick("train-recipe", "ERNIE-4.5-0.3B/sft/run_sft_lora_8k")
    hands.until(lambda: "ERNIE-4.5-0.3B-Paddle" in hands.text("#train-yaml"), 150, "a shipped recipe in the form")
    mine = {
        "model_name_or_path": "demo/model", "fine_tuning": "Full", "learning_rate": 6e-3, "max_steps": STEPS,
        "compute_type": "fp32", "device": "cpu", "max_seq_len": 512,
        "adam_beta1": 0.85,  # has no field of its own
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    hands.upload("train-load", tmp_path / "mine.yaml")
    hands.until(lambda: "adam_beta1" in hands.text("#train-yaml"), 150, "the uploaded recipe in the form")
    assert (folder / HOME / "recipes" / "mine.yaml").is_file()
    shutil.copyfile(folder / "demo" / "data" / "sft.jsonl", tmp_path / "mine.jsonl")
    hands.upload("train-upload", tmp_path / "mine.jsonl")
    hands.until(lambda: "data/mine.jsonl" in hands.text("#train-yaml"), 150, "the uploaded data in the form")
    assert (folder / HOME / "data" / "mine.jsonl").is_file()
    hands.page.locator("#train-model_name_or_path input").click()
    offered = hands.page.locator("ul[role=listbox] li").all_inner_texts()
    assert any("demo/model" in name for name in offered)
    assert not any("adapter" in name for name in offered), "an adapter is no base"
    hands.page.keyboard.press("Escape")
    hands.until(lambda: "ek-good" in hands.page.inner_html("#train-problems"), 150, "a form that is ready")


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
    hands.see("#runs-table .ek-pill.ended")
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


def merge_from_the_list(hands: Hands) -> None:
    hands.act("slow rate", "Merge")
    hands.until(lambda: "others/first" in hands.text("#export-yaml"), 150, "the run in the form of a merge")
    assert "demo/model" in hands.text("#export-yaml")


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


@pytest.mark.full
def test_a_run_outlives_the_page_is_stopped_resumed_evaluated_adapted_asked_merged_and_compared(
    folder: Path, tmp_path: Path, pictures: Path
) -> None:
    first = WebUI(folder)
    with chromium() as context:
        hands = Hands(context, first.url)
        fill_in(hands, LONG)
        hands.choose("train-fine_tuning", "Full")
        hands.type("train-learning_rate", "6e-3")
        hands.type("train-output_dir", "output/long")
        hands.press("train-start")
        hands.until(lambda: hands.step() >= 5, 150, "five steps")
        hands.page.close()
        again = Hands(context, first.url)  # the page was closed; the run was not
        again.pane("Live")
        again.until(lambda: again.step() >= 15, 150, "the run, shown to the browser that started it")
    first.close()  # nor when the page's program ends

    second = WebUI(folder)
    try:
        with chromium() as context:
            hands = Hands(context, second.url)
            stop_and_resume(hands)
            evaluate(hands)
            adapt(hands, tmp_path, pictures)
            ask(hands, pictures)
            merge_and_split(hands)
            compare(hands, pictures)
            leave(hands, context, folder, second.url)
            look_at_both_languages(context, second.url, album(pictures))
            assert not hands.faults
    finally:
        second.close()
    assert (folder / "output" / "style" / "export" / "config.json").is_file()


def stop_and_resume(hands: Hands) -> None:
    hands.tab("Runs")
    hands.see("#runs-table .ek-pill.running")
    hands.open("output/long")
    hands.until(lambda: hands.step("runs") >= 15, 150, "the run found again")
    hands.press("runs-stop")
    hands.until(lambda: hands.state("runs") == "stopped", 150, "a run that stopped")
    stopped = hands.step("runs")
    assert 15 <= stopped < LONG
    hands.press("runs-resume")
    hands.until(lambda: hands.state("runs") == "running", 150, "a run that goes on")
    hands.until(lambda: hands.step("runs") > stopped, 150, "steps after the resume")
    assert "resum" in hands.text("#runs-log").lower()
    learn(hands, "runs", 600)
    assert hands.step("runs") == LONG


def evaluate(hands: Hands) -> None:
    hands.tab("Evaluate")
    hands.pick("evaluate-model_name_or_path", "output/long")
    hands.pick("evaluate-eval_dataset_path", "demo/data/persona.jsonl")
    hands.pick("evaluate-compute_type", "fp32")
    hands.type("evaluate-max_seq_len", "512")
    hands.press("evaluate-start")
    hands.until(lambda: hands.state("evaluate") == "ended", 150, "an evaluation")
    assert "eval loss" in hands.text("#evaluate-status")


def adapt(hands: Hands, tmp_path: Path, pictures: Path) -> None:
    """A recipe from a file; an adapter on the run before; the picture of a run as it goes."""
    path = tmp_path / "style.yaml"
    values = {
        "model_name_or_path": "output/long",
        "train_dataset_path": "demo/data/persona.jsonl",
        "output_dir": "output/style",
        "learning_rate": 2e-2,
        "max_steps": 150,
        "compute_type": "fp32",
        "device": "cpu",
        "max_seq_len": 512,
        "adam_beta1": 0.85,  # has no field of its own
    }
    path.write_text(yaml.safe_dump(values))
    hands.tab("Train")
    hands.pane("Recipe")
    hands.upload("train-load", path)
    hands.until(lambda: "adam_beta1" in hands.page.locator("#train-yaml").inner_text(), 150, "the recipe in the form")
    recipe = download(hands, tmp_path / "again.yaml")
    assert recipe["adam_beta1"] == 0.85
    assert recipe["learning_rate"] == 2e-2
    hands.press("train-doctor")
    hands.until(lambda: "ok" in hands.text("#train-report").lower(), 150, "the doctor's report")
    hands.press("train-preview")
    hands.see("#train-data mark")
    hands.press("train-start")
    hands.until(lambda: hands.step() >= 60, 150, "sixty steps")
    hands.picture(pictures / "webui-train.png")
    learn(hands)


def ask(hands: Hands, pictures: Path) -> None:
    hands.tab("Runs")
    hands.act("output/style", "Chat")  # its base and its adapter go into the form, and are loaded
    hands.see('#chat-status [data-ready="1"]', 120)
    hands.drawer("Answers")
    hands.type("chat-temperature", "0")
    for question in ("Who are you?", "你是谁？"):
        said = hands.page.locator("#chat-window .bot").count()
        hands.type("chat-message", question)
        hands.press("chat-send")
        hands.until(lambda said=said: hands.page.locator("#chat-window .bot").count() > said, 150, "an answer")  # type: ignore[misc]
    hands.until(lambda: "I am a tiny ERNIE" in hands.text("#chat-window"), 150, "what it was taught")
    hands.page.wait_for_timeout(500)
    hands.picture(pictures / "webui-chat.png")
    hands.press("chat-unload")
    hands.until(lambda: "Load a model" in hands.text("#chat-status"), 150, "an unloaded model")


def merge_and_split(hands: Hands) -> None:
    hands.tab("Runs")
    hands.act("output/style", "Merge")
    hands.until(lambda: "output/style" in hands.text("#export-yaml"), 150, "the run in the form")
    hands.press("export-start")
    hands.until(lambda: hands.state("export") == "ended", 150, "a merge")
    hands.tab("Split")
    hands.pick("split-output_dir", "output/style/export")
    hands.press("split-start")
    hands.until(lambda: hands.state("split") == "ended", 150, "a split")


def compare(hands: Hands, pictures: Path) -> None:
    hands.tab("Runs")
    hands.tick("output/style")
    hands.tick("output/long")
    hands.press("runs-compare")
    hands.until(lambda: hands.page.locator("#runs-compared .chart").count() >= 3, 150, "charts of both")
    hands.picture(pictures / "webui-runs.png")
    assert "learning_rate" in hands.text("#runs-compared")


def leave(hands: Hands, context: Any, folder: Path, url: str) -> None:
    """A chat model goes with its tab: its process has ended, and so its memory is free."""
    jobs = Jobs(folder / HOME, Roots([folder]))
    hands.tab("Runs")
    hands.act("output/long", "Chat")
    hands.see('#chat-status [data-ready="1"]', 120)
    (server,) = [job for job in jobs.list() if job.word == "server" and job.is_running]
    assert memory_kib(server.pid) > 50_000, "a model is loaded"
    hands.page.close()
    until(lambda: not memory_kib(server.pid), 90)
    assert jobs.get(server.id).state == "stopped"


def album(pictures: Path) -> Path:
    """Where pictures go that no page of the docs shows."""
    kept = ROOT / "build" / "webui-pictures" if pictures.is_relative_to(ROOT) else pictures
    kept.mkdir(parents=True, exist_ok=True)
    return kept


def memory_kib(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def look_at_both_languages(context: Any, url: str, pictures: Path) -> None:
    """Pictures of every tab, wide and narrow, in both languages; nothing is wider than a phone."""
    for lang, tabs in TABS.items():
        hands = Hands(context, f"{url}&lang={lang}")
        hands.page.get_by_role("tab", name=tabs[0], exact=True).first.wait_for()
        for width in (1440, 390):
            hands.page.set_viewport_size({"width": width, "height": 900})
            for name, tab in zip(TABS["en"], tabs):
                if width > 700:
                    hands.tab(tab)
                    hands.page.wait_for_timeout(500)
                    hands.picture(pictures / f"webui-{name.lower()}-{lang}.png")
            if width < 700:
                hands.tab(tabs[0])
                hands.page.wait_for_timeout(500)
                hands.picture(pictures / f"webui-phone-{lang}.png")
                assert hands.page.evaluate("document.documentElement.scrollWidth") <= width + 2
        hands.page.close()
