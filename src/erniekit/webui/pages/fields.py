"""Fields: declared keys as the components of a form, their values out of it and into it. Used by every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.webui.forms import FieldSpec, FormProblem, check, from_yaml, to_yaml
from erniekit.webui.pages.page_context import PageContext, as_problem, folders, notice
from erniekit.webui.private_files import public_value
from erniekit.webui.recipe_files import read_recipe
from erniekit.webui.translations import help_of, label_of
from erniekit.webui.uploads import received

FEW = 4  # choices that fit side by side


class FormFields:
    """Components by key, in the order they were made; those of `offers` offer the folders and files there are."""

    def __init__(self, page: str, context: PageContext, offers: Sequence[str] = ()) -> None:
        self.page, self.context, self.labels = page, context, context.labels
        now = folders(context) if offers else {}
        self.suggestions: dict[str, list[str]] = {key: now[key] for key in offers}
        self.specs: dict[str, FieldSpec] = {}
        self.components: list[Any] = []

    def add(self, spec: FieldSpec, **options: Any) -> Any:
        """The component of one key; `value` in options stands for the default."""
        key = spec.key
        kind, texts = self._kind(spec, options)
        texts |= options.pop("texts", {})
        options = {"min_width": 140, "interactive": True, "elem_id": f"{self.page}-{key}", **options}
        component = self.labels.make(kind, texts, **options)
        self.specs[key] = spec
        self.components.append(component)
        return component

    def _kind(self, spec: FieldSpec, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        key, kind = spec.key, spec.kind
        page = self.page
        texts: dict[str, Any] = {
            "label": lambda lang: label_of(key, lang, page),
            "info": lambda lang: help_of(key, lang, page),
        }
        options.setdefault("value", spec.default)
        if kind == "flag" and spec.default is None:  # undecided is a value of its own
            options.update(value="", choices=["", "True", "False"])
            return gr.Dropdown, texts
        if kind == "flag":
            return gr.Checkbox, texts
        if _may_be_empty(spec):  # gradio shows an empty number as 0
            options["value"] = _joined(options["value"])
            return gr.Textbox, texts
        if kind == "number":
            options.setdefault("precision", 0 if spec.whole else None)
            return gr.Number, texts
        if kind == "choice":
            options["choices"] = list(spec.choices)
            return (gr.Radio if len(spec.choices) <= FEW else gr.Dropdown), texts
        if key in self.suggestions or (kind == "list" and spec.choices):
            several = kind == "list"
            options.setdefault("value", [] if several else None)
            options.update(
                choices=list(spec.choices or self.suggestions[key]),
                multiselect=several,
                allow_custom_value=not spec.choices,
            )
            return gr.Dropdown, texts
        if kind == "list":
            options["value"] = _joined(spec.default)
        return gr.Textbox, texts

    def component(self, key: str) -> Any:
        return self.components[list(self.specs).index(key)]

    def values(self, raw: Sequence[Any]) -> dict[str, Any]:
        """What the components hold, by key; lists typed as text are split at commas."""
        out: dict[str, Any] = {}
        for (key, spec), value in zip(self.specs.items(), raw):
            if spec.kind == "list" and isinstance(value, str):
                value = [item.strip() for item in value.split(",") if item.strip()]
            if _may_be_empty(spec) and isinstance(value, str):
                value = _number(value.strip(), spec.whole)
            if value is None or value == "" or value == []:
                if spec.default in (None, "", []):
                    continue
                value = spec.default if not spec.optional else value
            out[key] = value
        return out

    def updates(self, values: Mapping[str, Any]) -> list[Any]:
        """Every component set to its value, or back to its default. Values come from stored recipes: secrets in
        addresses are not shown again."""
        out = []
        for (key, spec), component in zip(self.specs.items(), self.components):
            value = public_value(values.get(key, spec.default))
            if spec.kind == "list" and isinstance(component, gr.Textbox):
                value = _joined(value)
            elif spec.kind == "flag" and spec.default is None:
                value = "" if value is None else str(value)
            elif _may_be_empty(spec):
                value = _joined(value)
            out.append(gr.update(value=value))
        return out

    def files(self) -> tuple[Any, list[Any]]:
        """A handler and its outputs: what fields that name files offer, found again."""
        keys = [key for key in self.specs if key in self.suggestions]

        def refresh() -> list[Any]:
            now = folders(self.context)
            return [gr.update(choices=now[key]) for key in keys]

        return refresh, [self.component(key) for key in keys]

    def without_field(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What is given for keys without a component."""
        return {key: public_value(value) for key, value in values.items() if key not in self.specs}


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "" if value is None else str(value)


def _may_be_empty(spec: FieldSpec) -> bool:
    return spec.kind == "number" and spec.default is None


def _number(text: str, whole: bool) -> Any:
    """What is typed as a number; other text as it is, for the form's check to report."""
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return text


def recipe(values: Mapping[str, Any], more: str, page: str, context: PageContext) -> tuple[str, list[FormProblem]]:
    """The YAML of a form and what is wrong with it; `more` is YAML of keys the form has no field for."""
    try:
        given = {**values, **(from_yaml(more, "more keys") if more.strip() else {})}
        problems = check(given, page, context.roots)
        return to_yaml(given, page), problems
    except ErnieKitError as error:
        return to_yaml(values, page), [as_problem(error)]


def uploaded(file: str, lang: str = "en") -> dict[str, Any]:
    """The values of a recipe that was uploaded."""
    try:
        return from_yaml(read_recipe(received(file)))
    except ErnieKitError as error:
        raise notice(error, lang) from None
