"""The page in a real Chromium: a person previews data, trains and watches, stops, resumes, chats, merges, downloads.

`make test-full` keeps the pictures the README shows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from erniekit.demo.tiny import make_tiny_model
from erniekit.webui.app import HOME
from erniekit.webui.jobs import Jobs
from erniekit.webui.paths import Roots
from support.browsing import Hands, WebUI, chromium, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a browser is here"),
    pytest.mark.xdist_group("webui"),
]
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "src" / "erniekit" / "demo" / "data"
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo's model and data. Jobs outlive their page, so what a failed test left running is ended here."""
    folder = tmp_path_factory.mktemp("my-models", numbered=False)
    make_tiny_model(folder / "demo" / "model")
    (folder / "demo" / "data").mkdir()
    rows = (DEMO / "sft-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "demo" / "data" / "sft.jsonl").write_text("".join(rows[:40]), encoding="utf-8")
    shutil.copyfile(DEMO / "persona.jsonl", folder / "demo" / "data" / "persona.jsonl")
    yield folder
    jobs = Jobs(folder / HOME, Roots([folder]))
    for job in jobs.list():
        jobs.stop(job.id, force=True)


@pytest.fixture(scope="module")
def webui(folder: Path) -> Iterator[WebUI]:
    running = WebUI(folder)
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
    assert hands.state(watch) == "ended", hands.page.locator(f"#{watch}-log textarea").input_value()
    return shapes


def download(hands: Hands, path: Path) -> dict[str, object]:
    with hands.page.expect_download() as download:
        hands.press("train-download")
    download.value.save_as(path)
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_a_person_previews_data_trains_watches_the_curve_and_downloads_the_recipe(webui: WebUI, tmp_path: Path) -> None:
    with chromium() as context:
        hands = Hands(context, webui.url)
        fill_in(hands, STEPS)
        hands.choose("train-fine_tuning", "Full")
        hands.type("train-learning_rate", "6e-3")
        hands.press("train-preview")
        assert hands.see("#train-data mark").inner_text().strip()
        hands.press("train-start")
        hands.see("#train-curves .chart")
        shapes = learn(hands)
        assert hands.step() == STEPS
        assert len(shapes) >= 2, "the curve did not move while it was watched"
        hands.pane("Recipe")
        recipe = download(hands, tmp_path / "recipe.yaml")
        assert recipe == {
            "model_name_or_path": "demo/model",
            "train_dataset_path": ["demo/data/sft.jsonl"],
            "max_seq_len": 512,
            "stage": "SFT",
            "max_steps": STEPS,
            "device": "cpu",
            "fine_tuning": "Full",
            "learning_rate": 6e-3,
            "compute_type": "fp32",
        }
        assert not hands.faults
        ours = urlsplit(webui.url).netloc
        assert not [url for url in hands.asked if urlsplit(url).netloc not in (ours, "")], "the page asked elsewhere"


@pytest.mark.full
def test_a_run_outlives_the_page_is_stopped_resumed_evaluated_adapted_asked_merged_and_compared(
    folder: Path, tmp_path: Path, pictures: Path
) -> None:
    first = WebUI(folder)
    with chromium() as context:
        hands = Hands(context, first.url)
        fill_in(hands, 400)
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
            compare(hands)
            speak_chinese(hands)
            assert not hands.faults
    finally:
        second.close()
    assert (folder / "output" / "style" / "export" / "config.json").is_file()


def stop_and_resume(hands: Hands) -> None:
    hands.tab("Runs")
    hands.see("#runs-table .ek-pill.running")
    hands.pick("runs-chosen", "running")
    hands.until(lambda: hands.step("runs") >= 15, 150, "the run found again")
    hands.press("runs-stop")
    hands.until(lambda: hands.state("runs") == "stopped", 150, "a run that stopped")
    stopped = hands.step("runs")
    assert 15 <= stopped < 400
    hands.press("runs-resume")
    hands.until(lambda: hands.state("runs") == "running", 150, "a run that goes on")
    hands.until(lambda: hands.step("runs") > stopped, 150, "steps after the resume")
    log = hands.page.locator("#runs-log textarea").input_value()
    assert "resum" in log.lower()
    learn(hands, "runs", 240)
    assert hands.step("runs") == 400


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
    hands.page.locator("#train-load input[type=file], input[type=file]").first.set_input_files(str(path))
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
    hands.tab("Chat")
    hands.pick("chat-model_name_or_path", "output/style")
    hands.press("chat-load")
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
    hands.tab("Export")
    hands.pick("export-output_dir", "output/style")
    hands.pick("export-model_name_or_path", "output/long")
    hands.press("export-start")
    hands.until(lambda: hands.state("export") == "ended", 150, "a merge")
    hands.tab("Split")
    hands.pick("split-output_dir", "output/style/export")
    hands.press("split-start")
    hands.until(lambda: hands.state("split") == "ended", 150, "a split")


def compare(hands: Hands) -> None:
    hands.tab("Runs")
    hands.pick("runs-chosen", "SFT · long")  # beside the one that is still chosen
    hands.press("runs-compare")
    hands.until(lambda: hands.page.locator("#runs-compared .chart").count() >= 3, 150, "charts of both")
    assert "learning_rate" in hands.text("#runs-compared")


def speak_chinese(hands: Hands) -> None:
    hands.choose("ek-lang", "中文")
    hands.until(lambda: hands.page.get_by_role("tab", name="训练", exact=True).count(), 150, "Chinese tabs")
    hands.page.get_by_role("tab", name="训练", exact=True).click()
    hands.until(lambda: "学习率" in hands.text("#train-learning_rate"), 150, "Chinese fields")
