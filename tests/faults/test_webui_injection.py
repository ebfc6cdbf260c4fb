"""W1: text meant for a shell, a command line or another folder, typed into every text field of the page.

Each is refused, or it ends as plain text in a recipe inside the job's folder; what is started is five known words.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from erniekit.config.flat import KEYS
from erniekit.errors import ErnieKitError
from erniekit.webui import forms
from erniekit.webui.jobs import Jobs, WebJob
from erniekit.webui.paths import KEYS as PATH_KEYS
from erniekit.webui.paths import Roots
from faults.results import fault

CANARY = "canary"
PAYLOADS = {
    "semicolon": f";touch {CANARY}",
    "substitution": f"$(touch {CANARY})",
    "backticks": f"`touch {CANARY}`",
    "newline": f"a\ntouch {CANARY}\n",
    "yaml line": "a\nengine_python: /bin/sh",
    "flag": "--allow_pickle=True",
    "short flag": "-rf",
    "climbs": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "nul": "a\x00b",
    "encoded": "%2e%2e/%2e%2e/etc/passwd",
    "link out": "leak/x",
    "long": "x" * 10_000,
    "pipe": f"| touch {CANARY} &",
    "yaml tag": "!!python/object/apply:os.system ['touch canary']",
}
REFUSED = {"newline", "yaml line", "nul", "long"}  # whatever the field
REFUSED_PATHS = REFUSED | {"climbs", "absolute", "link out"}
REFUSED_WORDS = REFUSED | {"flag", "short flag"}
NEEDED = {
    "model_name_or_path": "model", "train_dataset_path": ["data.jsonl"], "eval_dataset_path": ["data.jsonl"],
    "output_dir": "model",
}  # fmt: skip


class FakeLauncher:
    """Starts nothing; keeps the words it was given."""

    pid = 0

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str], log: Path, folder: Path) -> FakeLauncher:
        self.asked.append(argv)
        return self

    def wait(self) -> int:
        return 0


@pytest.fixture
def room(tmp_path: Path) -> Path:
    room = tmp_path / "work"
    (room / "model").mkdir(parents=True)
    (room / "data.jsonl").write_text('{"src": ["a"], "tgt": ["b"]}\n')
    (tmp_path / "outside").mkdir()
    (room / "leak").symlink_to(tmp_path / "outside")
    return room


def text_fields(page: str) -> list[forms.FieldSpec]:
    found = [f for f in forms.form(page).fields if f.kind in ("text", "path") or (f.kind == "list" and not f.choices)]
    return [f for f in found if KEYS[f.key].item == "str"]


def hostile(pages: tuple[str, ...]) -> Iterator[tuple[str, forms.FieldSpec, str, str]]:
    for page in pages:
        for f in text_fields(page):
            for name, text in PAYLOADS.items():
                yield page, f, name, text


def recipe_for(page: str, key: str, value: object) -> str:
    needed = {name: value for name, value in NEEDED.items() if name in forms.form(page).needed or page == "train.pt"}
    return forms.to_yaml({**needed, key: value}, page)


def harmless(job: WebJob, f: forms.FieldSpec, text: str, room: Path) -> None:
    """What was passed on is the same text, or the real path it names inside the roots."""
    told = forms.from_yaml(job.recipe.read_text(encoding="utf-8"))
    value = told.get(f.key)
    values = value if isinstance(value, list) else [value]
    assert "engine_python" not in told
    for one in values:
        if f.key in PATH_KEYS:
            assert Path(os.path.realpath(str(one))).is_relative_to(room.resolve()), (f.key, one)
        else:
            assert one is None or str(one) in text, (f.key, one)


def try_all(room: Path, pages: tuple[str, ...]) -> tuple[int, int]:
    launcher = FakeLauncher()
    jobs = Jobs(room / "webui", Roots([room]), launcher)
    before = {p for p in room.parent.rglob("*") if (room / "webui") not in p.parents}
    tried = passed = longest = 0
    for page, f, name, text in hostile(pages):
        tried += 1
        value = [text] if f.kind == "list" else text
        command = forms.form(page).command
        try:
            job = jobs.start(command, recipe_for(page, f.key, value))
        except ErnieKitError as error:
            longest = max(longest, len(str(error)))
            continue
        assert name not in (REFUSED_PATHS if f.key in PATH_KEYS else REFUSED_WORDS), f"{page} {f.key} took {name}"
        passed += 1
        words = [sys.executable, "-m", "erniekit", command, str(room / "webui" / "jobs" / job.id / "recipe.yaml")]
        assert launcher.asked[-1] == words
        harmless(job, f, text, room)
    assert len(launcher.asked) == passed
    assert longest < 1500, "an error does not repeat ten thousand letters"
    after = {p for p in room.parent.rglob("*") if (room / "webui") not in p.parents}
    assert after == before, "a file outside the jobs' folder"
    return tried, passed


def test_no_field_of_the_small_forms_carries_a_command_a_flag_or_a_path_out(room: Path) -> None:
    with fault("W1", "hostile text in every text field of the evaluate, chat, export and split forms") as entry:
        tried, passed = try_all(room, ("evaluate", "chat", "export", "split"))
        entry.count = entry.hits = tried
        entry.note = f"{tried - passed} refused, {passed} kept as plain text"
        assert tried >= 12 * 12
        assert tried > passed > 0


def test_no_first_field_of_training_carries_a_command_a_flag_or_a_path_out(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = text_fields("train.sft")
    monkeypatch.setitem(globals(), "text_fields", lambda page: [f for f in full if f.basic or f.key == "run_name"])
    with fault("W1", "hostile text in the first text fields of training") as entry:
        tried, passed = try_all(room, ("train.sft",))
        entry.count = entry.hits = tried
        entry.note = f"{tried - passed} refused, {passed} kept as plain text"
        assert tried >= 5 * 12


@pytest.mark.full
@pytest.mark.parametrize("page", ["train.sft", "train.dpo", "train.pt"])
def test_no_field_of_training_carries_a_command_a_flag_or_a_path_out(room: Path, page: str) -> None:
    with fault("W1", "hostile text in every text field of the training forms") as entry:
        tried, passed = try_all(room, (page,))
        entry.count = entry.hits = tried
        entry.note = "all refused or kept as plain text"
        assert passed > 0
        assert tried > 12 * 12


def test_what_passes_is_only_text_to_the_real_command_too(room: Path) -> None:
    """One real process for all the payloads that are let through: its words are read, and none is run."""
    names = [text for name, text in PAYLOADS.items() if name not in REFUSED_WORDS]
    with fault("W1", "hostile text in a field of a real process") as entry:
        jobs = Jobs(room / "webui", Roots([room]))
        values = {
            "model_name_or_path": "model", "engine": "transformers", "tensor_parallel_degree": 2,
            "served_model_name": " ".join(names),
        }  # fmt: skip
        job = jobs.start("server", forms.to_yaml(values, "chat"))
        end = time.monotonic() + 60
        while (job := jobs.get(job.id)).is_running and time.monotonic() < end:
            time.sleep(0.05)
        assert (job.state, job.code) == ("failed", 2), jobs.log_tail(job.id).text
        assert "one device" in jobs.log_tail(job.id).text
        assert not list(room.parent.rglob(CANARY))
        assert not Path(CANARY).exists()
        entry.count = entry.hits = len(names)
        entry.note = "no process but the expected one"
