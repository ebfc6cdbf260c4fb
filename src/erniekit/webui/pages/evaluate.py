"""The Evaluate tab: loss and perplexity of a model on evaluation files. Put together by app.py."""

from __future__ import annotations

from typing import Any

from erniekit.webui.pages.job_form import JobForm
from erniekit.webui.pages.page_context import PageContext

ROWS = (
    ("model_name_or_path", "eval_dataset_path"),
    ("lora_path", "stage", "compute_type"),
    ("max_seq_len", "batch_size", "max_evaluate_steps"),
    ("device", "eval_dataset_type", "output_dir"),
    ("override_base",),
)


class EvaluatePage:
    def __init__(self, context: PageContext) -> None:
        self.form = JobForm(context, "evaluate", ROWS, "evaluate.start")

    def on_open(self, page: Any) -> None:
        self.form.on_open(page)

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.form.files()]
