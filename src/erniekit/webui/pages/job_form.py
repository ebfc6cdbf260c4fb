"""JobForm: a small form, its recipe and its job side by side. Evaluate and both exports are one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from erniekit.errors import ErnieKitError
from erniekit.printable import public
from erniekit.webui.forms import form
from erniekit.webui.pages.fields import FormFields, recipe, uploaded
from erniekit.webui.pages.job_monitor import JobMonitor
from erniekit.webui.pages.page_context import PageContext, notice, problems_html
from erniekit.webui.translations import translate

WIDE = ("model_name_or_path", "eval_dataset_path", "output_dir")
OFFERS = ("model_name_or_path", "lora_path", "eval_dataset_path")


class JobForm:
    def __init__(
        self, context: PageContext, page: str, rows: Sequence[Sequence[str]], button: str, hint: str = ""
    ) -> None:
        self.context, self.page, self.form = context, page, form(page)
        labels = context.labels
        # A folder that must be there is chosen; one that will be made is typed.
        offers = (*OFFERS, "output_dir") if "output_dir" in self.form.needed else OFFERS
        self.fields = FormFields(page, context, [f.key for f in self.form.fields if f.key in offers])
        with gr.Row(equal_height=False):
            with gr.Column(scale=6, min_width=420):
                if hint:
                    labels.heading(hint, elem_classes="ek-hint")
                with gr.Group():
                    for row in rows:
                        with gr.Row():
                            for key in row:
                                self._field(key)
            with gr.Column(scale=5, min_width=420, elem_classes="ek-side"):
                self.start = labels.make(gr.Button, {"value": button}, variant="primary", elem_id=f"{page}-start")
                self.problems = gr.HTML("", elem_id=f"{page}-problems")
                self.monitor = JobMonitor(context, page, self.form.command, charts=False)
                with labels.make(gr.Accordion, {"label": "recipe.title"}, open=True):
                    self._recipe_box()
        self._wire()

    def _field(self, key: str) -> None:
        spec = self.form.field(key)
        options: dict[str, Any] = {"min_width": 300} if key in WIDE else {}
        if key == "output_dir" and key not in self.form.needed:
            options.update(value="", texts={"placeholder": "train.own_folder"})
        if key == "output_dir" and key in self.form.needed:  # of these commands it is what they start from
            options.update(value=None)
        self.fields.add(spec, **options)

    def _recipe_box(self) -> None:
        labels, page = self.context.labels, self.page
        labels.make(
            gr.Code,
            {"label": "recipe.command"},
            value=f"erniekit {self.form.command} recipe.yaml",
            language="shell",
            interactive=False,
            lines=1,
            elem_id=f"{page}-command",
        )
        self.yaml = labels.make(
            gr.Code, {"label": "recipe.yaml"}, language="yaml", interactive=False, lines=4, elem_id=f"{page}-yaml"
        )
        with gr.Row():
            self.save = labels.make(gr.Button, {"value": "recipe.download"}, elem_id=f"{page}-download")
            self.load = labels.make(
                gr.UploadButton,
                {"label": "recipe.load"},
                file_types=[".yaml", ".yml", ".json"],
                elem_id=f"{page}-load",
            )

    def _wire(self) -> None:
        context, inputs = self.context, [self.context.lang, *self.fields.components]
        gr.on(
            [c.change for c in inputs],
            self._recipe,
            inputs,
            [self.yaml, self.problems],
            show_progress="hidden",
            trigger_mode="always_last",
            concurrency_limit=None,
        )
        self.save.click(None, self.yaml, None, js="text => { erniekitSave(text, 'recipe.yaml'); }")
        self.load.upload(self._load, [context.lang, self.load], self.fields.components, show_progress="minimal")
        self.start.click(
            self._start,
            [context.lang, context.owner, *self.fields.components],
            self.monitor.outputs,
            concurrency_limit=None,
        )

    def on_open(self, page: Any) -> None:
        self.monitor.on_open(page)
        inputs = [self.context.lang, *self.fields.components]
        page.load(self._recipe, inputs, [self.yaml, self.problems], show_progress="hidden")
        handler, outputs = self.files()
        page.load(handler, None, outputs, show_progress="hidden")

    def files(self) -> tuple[Any, list[Any]]:
        return self.fields.files()

    def _recipe(self, lang: str, *raw: Any) -> tuple[str, str]:
        text, problems = recipe(self.fields.values(raw), "", self.page, self.context)
        return public(text) or f"# {translate('recipe.empty', lang)}\n", problems_html(problems, lang, self.page)

    def _load(self, lang: str, file: str) -> list[Any]:
        return self.fields.updates(uploaded(file, lang))

    def _start(self, lang: str, owner: str, *raw: Any) -> list[Any]:
        text, problems = recipe(self.fields.values(raw), "", self.page, self.context)
        if problems:
            raise gr.Error(problems_html(problems, lang, self.page), duration=12, print_exception=False)
        try:
            return self.monitor.show(self.context.jobs.start(self.form.command, text, owner), lang)
        except ErnieKitError as error:
            raise notice(error, lang) from None
