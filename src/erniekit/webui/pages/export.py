"""The Export tab: merge adapters into their base, or cut weights into files of a size. Put together by app.py."""

from __future__ import annotations

from typing import Any

import gradio as gr

from erniekit.webui.pages.job_form import JobForm
from erniekit.webui.pages.page_context import PageContext

MERGE = (
    ("output_dir", "model_name_or_path"),
    ("lora_path", "save_format"),
    ("max_shard_size", "copy_tokenizer", "override_base"),
)
SPLIT = (("output_dir", "model_name_or_path"), ("save_format", "max_shard_size", "copy_tokenizer"))


class ExportPage:
    def __init__(self, context: PageContext) -> None:
        with gr.Tabs(selected="merge", elem_id="export-kinds") as self.kinds:
            with context.labels.make(gr.Tab, {"label": "export.merge"}, id="merge"):
                self.merge = JobForm(context, "export", MERGE, "export.start", hint="export.hint")
            with context.labels.make(gr.Tab, {"label": "export.split"}, id="split"):
                self.split = JobForm(context, "split", SPLIT, "split.start", hint="split.hint")

    def on_open(self, page: Any) -> None:
        self.merge.on_open(page)
        self.split.on_open(page)

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.merge.files(), self.split.files()]
