"""Checks before a run: rows of a dataset with the trained tokens marked, and the doctor's report.

Called by the train page. Both run the CLI in a child process with a time limit; nothing of training is imported here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigError
from erniekit.printable import public
from erniekit.webui import forms
from erniekit.webui.forms import FormProblem
from erniekit.webui.job_log import plain
from erniekit.webui.jobs import TOKEN_VARIABLE
from erniekit.webui.paths import Roots

# How pictures are seen: their tokens depend on it.
VISION_KEYS = (
    "min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "video_fps", "video_min_frames",
    "video_max_frames", "render_timestamp", "use_pic_id", "chat_template", "media_timeout",
)  # fmt: skip
PREVIEW_S, DOCTOR_S = 60.0, 300.0
MAX_OUTPUT = 4 * 2**20  # bytes


@dataclass(frozen=True)
class PreviewPiece:
    text: str
    trained: bool
    rejected: bool = False  # trained too, as the answer that a pair rejects


@dataclass(frozen=True)
class PreviewMedium:
    """A picture or video of a row, and what it costs."""

    kind: str
    name: str
    tokens: int
    size: tuple[int, int]
    frames: int = 1
    thumbnail: str = ""  # a data: URL of a JPEG


@dataclass(frozen=True)
class PreviewRow:
    """One row as the model sees it; `problem`: why it is not used."""

    file: str
    line: int
    pieces: tuple[PreviewPiece, ...] = ()
    tokens: int = 0
    trained: int = 0
    problem: str = ""
    unused: tuple[str, ...] = ()  # its fields that nothing reads
    media: tuple[PreviewMedium, ...] = ()

    @property
    def html(self) -> str:
        """Escaped; trained tokens are <mark>, those of a rejected answer <mark class="rejected">."""
        if self.problem:
            return f'<span class="bad-row">{escape(self.problem)}</span>'
        return "".join(_marked(p) for p in self.pieces).replace("\n", "<br>")


@dataclass(frozen=True)
class Preview:
    """`total`: rows of all files, 0 where they were not counted; `error`: the message of the CLI that stopped it."""

    rows: tuple[PreviewRow, ...] = ()
    total: int = 0
    format: str = ""
    error: str = ""
    problems: tuple[FormProblem, ...] = ()  # with the values: nothing was read


@dataclass(frozen=True)
class Report:
    """Output of `erniekit doctor`. `ok` only if every check passed."""

    ok: bool
    text: str
    seconds: float = 0.0
    timed_out: bool = False
    lines: list[str] = field(default_factory=list)


def preview(
    values: Mapping[str, Any], roots: Roots, page: str = "train.sft", start: int = 0, count: int = 10,
    timeout: float = PREVIEW_S, evaluation: bool = False,
) -> Preview:  # fmt: skip
    """Rows `start` to `start + count` of the files these values name, read with their model's tokenizer."""
    which = "eval" if evaluation else "train"
    wanted = (
        "model_name_or_path", "tokenizer_name", "download_hub", "max_seq_len", "overlong", "train_thinking", "stage",
        "compat", "max_prompt_len", "mask_out_eos_token", "class_labels", "columns", "input_dir",
        f"{which}_dataset_path", f"{which}_dataset_type",
        *VISION_KEYS,
    )  # fmt: skip
    values_read = {name: value for name, value in {**forms.form(page).fixed, **values}.items() if name in wanted}
    values_read = {name.replace("eval_", "train_", 1): value for name, value in values_read.items()}
    problems = forms.check_each(values_read, roots)
    if not values_read.get("train_dataset_path"):
        problems = [FormProblem(f"{which}_dataset_path", f"{which}_dataset_path must be given", "")]
    if problems:
        return _refused(*problems)
    try:
        recipe = forms.to_yaml(roots.resolve_values(values_read), page)
    except ConfigError as error:
        return _refused(FormProblem("", error.what, error.fix))
    arguments = ["--json", "--from", str(max(0, int(start))), "--rows", str(min(100, max(1, int(count))))]
    done = run(["data", "preview"], recipe, timeout, arguments, roots)
    if done.timed_out:
        return _refused(FormProblem("", f"no answer within {timeout:.0f} s", "name smaller files"))
    if not done.ok:
        return Preview(error=done.text)
    return _parsed(done.text)


def _refused(*problems: FormProblem) -> Preview:
    return Preview(error="\n".join(map(str, problems)), problems=problems)


def doctor(recipe: str, roots: Roots, timeout: float = DOCTOR_S) -> Report:
    """`erniekit doctor` on a recipe (YAML text); its files go to a folder that is removed."""
    try:
        values = forms.checked(recipe, "doctor", roots)
    except ConfigError as error:
        return Report(False, str(error))
    with tempfile.TemporaryDirectory(prefix="erniekit-doctor-") as folder:
        values = {**values, "output_dir": folder}
        recipe = forms.to_yaml(values, forms.page_of("doctor", values))
        return run(["doctor"], recipe, timeout, roots=roots)


def run(
    arguments: list[str], recipe: str, timeout: float, further: list[str] | None = None, roots: Roots | None = None
) -> Report:
    """`erniekit WORDS recipe.yaml` to its end. After `timeout` it and all it started are ended. In the first root, as a
    job: relative paths inside a list of files start there."""
    began = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    env |= roots.environment if roots else {}
    with tempfile.TemporaryDirectory(prefix="erniekit-") as own, tempfile.TemporaryFile() as out:
        file = Path(own) / "recipe.yaml"
        file.write_text(recipe, encoding="utf-8")
        argv = [sys.executable, "-m", "erniekit", *arguments, str(file), *(further or [])]
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env={**env, "NO_COLOR": "1"},
            start_new_session=True, cwd=roots.folders[0] if roots else None,
        )  # fmt: skip
        timed_out = False
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        text = plain(out.read(MAX_OUTPUT).decode("utf-8", errors="replace")).strip().replace(str(file), "recipe.yaml")
        text = public(text)
    return Report(
        child.returncode == 0 and not timed_out, text, round(time.monotonic() - began, 2), timed_out, text.splitlines()
    )


def _marked(piece: PreviewPiece) -> str:
    if not piece.trained:
        return escape(piece.text)
    kind = ' class="rejected"' if piece.rejected else ""
    return f"<mark{kind}>{escape(piece.text)}</mark>"


def _medium(data: Mapping[str, Any]) -> PreviewMedium:
    wide, high = map(int, data["size"])
    further = int(data.get("frames", 1)), str(data.get("thumbnail", ""))
    return PreviewMedium(str(data["kind"]), str(data["name"]), int(data["tokens"]), (wide, high), *further)


def _parsed(text: str) -> Preview:
    try:
        data = json.loads(text[text.index("{") :].splitlines()[0])
        rows = tuple(
            PreviewRow(
                str(row["file"]),
                int(row["line"]),
                tuple(PreviewPiece(str(t), part > 0, part == 2) for t, part in row.get("pieces", ())),
                int(row.get("tokens", 0)),
                int(row.get("trained", 0)),
                str(row.get("problem", "")),
                tuple(map(str, row.get("unused", ()))),
                tuple(_medium(one) for one in row.get("media", ())),
            )
            for row in data["rows"]
        )
        return Preview(rows, int(data["total"]), str(data["format"]))
    except (ValueError, KeyError, TypeError, IndexError):
        return Preview(error=text[-2000:])
