"""The page of `erniekit webui` in a real Chromium, for tests: the program, the browser, and a person's hands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from erniekit.webui.translations import translate
from support.clock import until

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_S = 90  # a browser beside other work on two cores
CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), "")


WORDS = """() => {
  const out = [], others = 'pre, code, .cm-editor, .ek-tokens, .ek-text, .message, script, style';
  const seen = e => e.checkVisibility() && e.getBoundingClientRect().width > 1;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), around = walk.currentNode.parentElement;
    if (text && !around.closest(others) && seen(around)) out.push(text);
  }
  document.querySelectorAll('[placeholder], [title]').forEach(e => {
    if (seen(e)) out.push(e.getAttribute('placeholder') || '', e.getAttribute('title') || '');
  });
  return out.filter(text => text);
}"""


def why_not() -> str:
    """Why no browser can be driven here, and the command that would change it; empty when one can."""
    if find_spec("gradio") is None or find_spec("playwright") is None:
        return 'gradio or playwright is missing: pip install -c constraints.txt -e ".[dev]"'
    if not CHROMIUM:
        return "no Chromium: apt-get install -y chromium (Debian's package)"
    return ""


class WebUI:
    """`erniekit webui` as a process of its own, in a folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.log = folder / f"webui-{time.time_ns()}.log"
        command = [sys.executable, "-m", "erniekit", "webui", "port=0", "lang=en", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ERNIEKIT_CACHE": str(folder / "cache")}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=env)
        try:
            until(lambda: "ready: " in self.text or self.process.poll() is not None, seconds=2 * PATIENCE_S)
            found = re.search(r"ready: (http://\S+)", self.text)
            assert found, self.text
        except AssertionError:
            self.close()  # a page that is late must not outlive its test
            raise
        self.url = found[1]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """As Ctrl-C does: the page ends, its jobs do not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def chromium(width: int = 1440, height: int = 900) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            options = {"viewport": {"width": width, "height": height}, "reduced_motion": "reduce"}
            context = browser.new_context(**options, accept_downloads=True)
            context.set_default_timeout(PATIENCE_S * 1000)
            yield context
        finally:
            browser.close()


@contextmanager
def another_browser(context: Any) -> Iterator[Any]:
    """As that of another person: nothing that the first one stores is known to it."""
    other = context.browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    try:
        other.set_default_timeout(PATIENCE_S * 1000)
        yield other
    finally:
        other.close()


class Hands:
    """What a person does on the page. Fields are named as their keys are: `train-learning_rate`."""

    def __init__(self, context: Any, url: str, lang: str = "en") -> None:
        self.page, self.lang = context.new_page(), lang
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(f"{url}&lang={lang}")
        self.page.wait_for_selector("#train-problems li, #train-problems .ek-good")
        self.page.get_by_role("tab", name=self.word("tab.train"), exact=True).first.wait_for()

    def word(self, key: str) -> str:
        """What the page says for one of its texts, in the language it is read in."""
        return translate(key, self.lang)

    def see(self, selector: str, seconds: float = PATIENCE_S) -> Any:
        found = self.page.locator(selector).first
        found.wait_for(state="visible", timeout=seconds * 1000)
        return found

    def press(self, name: str) -> None:
        self.see(f"#{name}").click()

    def tab(self, label: str) -> None:
        """A tab of the page or of a pane, by what is written on it."""
        self.page.get_by_role("tab", name=label, exact=True).first.click()

    def pane(self, label: str) -> None:
        self.page.locator("#train-panes").get_by_role("tab", name=label, exact=True).click()

    def drawer(self, label: str) -> None:
        self.page.get_by_role("button", name=label, exact=False).first.click()

    def type(self, field: str, text: str) -> None:
        box = self.see(f"#{field} input:visible, #{field} textarea:visible")
        box.fill(text)
        box.press("Tab")

    def pick(self, field: str, text: str) -> None:
        """A value of a list: typed, then clicked where the list offers it, else confirmed as one's own."""
        box = self.see(f"#{field} input")
        for _ in range(5):
            box.click()
            box.fill(text)
            self.page.wait_for_timeout(200)
            offered = self.page.locator("ul[role=listbox] li").filter(has_text=re.compile(rf"^\W*{re.escape(text)}$"))
            if offered.count():
                offered.first.click()
            else:
                box.press("Enter")
            box.blur()
            self.page.wait_for_timeout(300)  # what the list did not take is gone by then
            # Where there may be several, they stand beside the box, each with more than was typed.
            if text == box.input_value() or text in self.text(f"#{field}"):
                return
        raise AssertionError(f"{field} does not take {text!r}: it says {box.input_value()!r}")

    def choose(self, field: str, label: str) -> None:
        self.page.locator(f"#{field} label", has_text=label).first.click()

    def upload(self, button: str, path: Path) -> None:
        with self.page.expect_file_chooser() as chooser:
            self.press(button)
        chooser.value.set_files(str(path))

    def download(self, button: str, path: Path) -> dict[str, Any]:
        """A recipe that a button hands out, kept and read."""
        import yaml

        with self.page.expect_download() as download:
            self.press(button)
        download.value.save_as(path)
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found

    def act(self, run: str, what: str) -> None:
        """A button beside a run in the list; `run` is its name, `what` is written on the button."""
        self._row(run).get_by_role("button", name=what, exact=True).click()

    def tick(self, run: str) -> None:
        self._row(run).locator(".ek-check").click()
        self._row(run).locator(".ek-check[aria-checked=true]").wait_for()

    def open(self, run: str) -> None:
        """Until it is the one that is open: a list that is drawn anew under the pointer has another run there."""

        def opened() -> bool:
            self._row(run).locator(".ek-open").click()
            end = time.monotonic() + 5
            while not self._row(run, "tr.opened").count() and time.monotonic() < end:
                self.page.wait_for_timeout(100)
            return bool(self._row(run, "tr.opened").count())

        self.until(opened, PATIENCE_S, f"{run} opened")
        self.see("#runs-status [data-state]")

    def _row(self, run: str, kind: str = "tr") -> Any:
        """Of the list of runs: the one with this name, or whose folder ends so."""
        name = self.page.locator(".ek-open", has_text=re.compile(rf"(^|/){re.escape(run)}$"))
        return self.page.locator(f"#runs-table {kind}", has=name).first

    def log_gap(self, watch: str = "train") -> int:
        """Pixels between what is seen of a log and its end."""
        script = "log => Math.round(log.scrollHeight - log.clientHeight - log.scrollTop)"
        return int(self.page.locator(f"#{watch}-log .ek-log").evaluate(script))

    def words(self) -> list[str]:
        """Every text that is seen now, without what a program or a person wrote: logs, code, data, conversations."""
        return list(self.page.evaluate(WORDS))

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def step(self, watch: str = "train") -> int:
        found = self.page.locator(f"#{watch}-status [data-step]")
        return int(found.first.get_attribute("data-step") or 0) if found.count() else 0

    def state(self, watch: str = "train") -> str:
        found = self.page.locator(f"#{watch}-status [data-state]")
        return str(found.first.get_attribute("data-state")) if found.count() else ""

    def curve(self, watch: str = "train") -> str:
        """The drawn line of the first chart."""
        line = self.page.locator(f"#{watch}-curves .chart path").first
        return str(line.get_attribute("d")) if line.count() else ""

    def until(self, done: Callable[[], Any], seconds: float, what: str) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := done():
                return found
            self.page.wait_for_timeout(100)
        raise AssertionError(f"{what}: not within {seconds} s\n{self.page.inner_text('body')[:3000]}")

    def picture(self, path: Path, most_kb: int = 200) -> None:
        """A screenshot small enough to keep; fewer colours where it would not be."""
        self.page.mouse.move(0, 0)
        self.page.evaluate("document.activeElement?.blur(); window.scrollTo(0, 0)")
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=path)
        if path.stat().st_size > most_kb * 1000:
            from PIL import Image

            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
