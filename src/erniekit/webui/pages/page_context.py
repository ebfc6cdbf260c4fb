"""Page context: what every tab is given - jobs, roots, the language and its labels. Built by app.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.charts import empty
from erniekit.webui.chat_leases import ChatLeases
from erniekit.webui.forms import FormProblem
from erniekit.webui.jobs import Jobs
from erniekit.webui.path_suggestions import suggest_paths
from erniekit.webui.paths import Roots
from erniekit.webui.problems import problem_text
from erniekit.webui.run_folders import kind_of
from erniekit.webui.runs import Runs
from erniekit.webui.translations import translate

Text = str | Callable[[str], Any]  # a key of TRANSLATIONS, or a function of the language


@dataclass
class Labels:
    """Components whose texts follow the language: made once, updated when another one is chosen."""

    lang: str
    _texts: list[tuple[Any, dict[str, Text]]] = field(default_factory=list)

    def make(self, kind: Callable[..., Any], texts: dict[str, Text], **options: Any) -> Any:
        """A component; `texts`: its properties that are texts."""
        component = kind(**{prop: translated(text, self.lang) for prop, text in texts.items()}, **options)
        self._texts.append((component, texts))
        return component

    def heading(self, key: str, **options: Any) -> Any:
        """A line of text: a title, a hint. Texts of our own, so they may hold markup."""
        return self.make(gr.HTML, {"value": key}, **options)

    def empty(self, key: str, **options: Any) -> Any:
        """A place where something will be shown; it is empty again in another language."""
        return self.make(gr.HTML, {"value": lambda lang: empty(translate(key, lang))}, **options)

    @property
    def components(self) -> list[Any]:
        return [component for component, _ in self._texts]

    def updates(self, lang: str) -> list[Any]:
        updates: list[dict[str, Any]] = [
            {p: translated(text, lang) for p, text in texts.items()} for _, texts in self._texts
        ]
        return [gr.update(**texts) for texts in updates]


def translated(text: Text, lang: str) -> Any:
    return text(lang) if callable(text) else translate(text, lang)


@dataclass
class PageContext:
    jobs: Jobs
    runs: Runs
    roots: Roots
    labels: Labels
    leases: ChatLeases
    lang: Any = None  # the switch: an input of every handler that shows text
    owner: Any = None  # id of the browser; its own runs are shown to it again

    def shown(self, path: str | Path) -> str:
        """A path as a person would type it: relative to the first root where it can be."""
        try:
            return str(Path(path).relative_to(self.roots.folders[0]))
        except ValueError:
            return str(path)


def folders(context: PageContext) -> dict[str, list[Any]]:
    """What fields that name files offer: the results of this page, newest first, then what is in the roots."""
    offers = suggest_paths(context.roots)
    results = [
        job.output_dir for job in context.jobs.list() if job.command == "train" and Path(job.output_dir).is_dir()
    ]
    kinds = {context.shown(folder): kind_of(folder) for folder in results}
    first = {
        "model_name_or_path": [name for name, kind in kinds.items() if kind.weights and not kind.adapter],
        "lora_path": [name for name, kind in kinds.items() if kind.weights and kind.adapter],
        "teacher_model_name_or_path": [name for name, kind in kinds.items() if kind.weights],
        "output_dir": [name for name, kind in kinds.items() if kind.weights],
    }
    for key, names in first.items():
        offers[key] = [*names, *(name for name in offers[key] if name not in names)]
    return offers


def problems_html(problems: list[FormProblem], lang: str, page: str = "") -> str:
    """What is wrong, a line each with the way out; or that nothing is."""
    if not problems:
        return f'<div class="ek-good">{escape(translate("form.good", lang))}</div>'
    rows = "".join(
        f"<li><b>{escape(p.key or translate('form.together', lang))}</b>{_problem_html(p, lang, page)}</li>"
        for p in problems
    )
    only_missing = all(p.what.endswith("must be given") for p in problems)
    return f'<ul class="ek-problems{" missing" if only_missing else ""}">{rows}</ul>'


def _problem_html(problem: FormProblem, lang: str, page: str = "") -> str:
    """What is wrong and how to fix it, escaped; the English original folded where there is no translation."""
    text = problem_text(problem.key, problem.what, problem.fix, lang, page)
    parts = [escape(text.what), f"<span>{escape(text.fix)}</span>" if text.fix else ""]
    if text.original:
        title = escape(translate("form.original", lang))
        parts.append(f"<details><summary>{title}</summary>{escape(text.original)}</details>")
    return "".join(parts)


def as_problem(error: ErnieKitError) -> FormProblem:
    return FormProblem(error.where, error.what, error.fix)


def notice(error: ErnieKitError, lang: str = "en") -> gr.Error:
    """An error of ours in the corner of the page; its text may come from outside, so it is escaped."""
    return gr.Error(_problem_html(FormProblem("", error.what, error.fix), lang), duration=12, print_exception=False)
