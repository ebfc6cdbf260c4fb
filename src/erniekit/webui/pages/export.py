"""The Export tab: merge adapters into their base, or cut weights into files of a size. Put together by app.py."""

from __future__ import annotations

from typing import Any

import gradio as gr

from erniekit.webui.pages.desk import Desk
from erniekit.webui.pages.job_form import JobForm

MERGE = (
    ("output_dir", "model_name_or_path"),
    ("lora_path", "save_format"),
    ("max_shard_size", "copy_tokenizer", "override_base"),
)
SPLIT = (("output_dir", "model_name_or_path"), ("save_format", "max_shard_size", "copy_tokenizer"))


class ExportPage:
    def __init__(self, desk: Desk) -> None:
        with gr.Tabs(elem_id="export-kinds"):
            with desk.labels.make(gr.Tab, {"label": "export.merge"}, id="merge"):
                self.merge = JobForm(desk, "export", MERGE, "export.start", hint="export.hint")
            with desk.labels.make(gr.Tab, {"label": "export.split"}, id="split"):
                self.split = JobForm(desk, "split", SPLIT, "split.start", hint="split.hint")

    def on_open(self, page: Any) -> None:
        self.merge.on_open(page)
        self.split.on_open(page)

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.merge.files(), self.split.files()]
