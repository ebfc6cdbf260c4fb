"""The Train tab: a form from the declared keys, the recipe it makes, the data preview, the doctor, and the run live.

Put together by app.py. The right side shows one thing at a time; pressing Start turns it to the live run.
"""

from __future__ import annotations

from html import escape
from typing import Any

import gradio as gr

from erniekit.errors import ConfigError, ErnieKitError
from erniekit.printable import public
from erniekit.webui.form_pages import STAGES
from erniekit.webui.forms import FieldSpec, Form, form, from_yaml, page_of, to_yaml
from erniekit.webui.pages.data_preview import DataPreview
from erniekit.webui.pages.fields import FormFields, recipe
from erniekit.webui.pages.job_monitor import JobMonitor
from erniekit.webui.pages.page_context import PageContext, as_problem, notice, problems_html
from erniekit.webui.pages.recipe_source import RecipeSource
from erniekit.webui.pages.stage_choice import FIRST as FIRST_STAGE
from erniekit.webui.pages.stage_choice import StageChoice
from erniekit.webui.preview import doctor
from erniekit.webui.translations import help_of, label_of

# Rows of the first card; other basic keys go to the accordion of their section.
FIRST: tuple[tuple[str, ...], ...] = (
    ("model_name_or_path", "train_dataset_path"),
    ("fine_tuning", "compute_type", "device"),
    ("learning_rate", "max_steps", "num_train_epochs"),
    ("batch_size", "gradient_accumulation_steps", "max_seq_len"),
    ("output_dir",),
)
# Drawers: their title, the sections whose basic keys they hold, and further keys worth a field of their own. What the
# chosen stage does not read is hidden, field by field and whole drawers.
DRAWERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "train.drawer.preferences",
        ("dpo", "score"),
        (
            "loss_type", "beta", "sft_loss_ratio", "label_smoothing", "max_prompt_len", "reference_free",
            "desirable_weight", "undesirable_weight", "reward_margin", "center_rewards_coefficient",
        ),
    ),
    ("train.drawer.classes", ("score",), ("class_labels",)),
    (
        "train.drawer.distill",
        ("distill",),
        ("teacher_model_name_or_path", "distill_alpha", "distill_temperature", "distill_kl"),
    ),
    (
        "train.drawer.vision",
        ("vision",),
        ("freeze_config", "vit_lr_ratio", "max_pixels", "video_fps", "video_max_frames", "text_dataset_path"),
    ),
    (
        "train.drawer.data",
        ("model", "data"),
        ("train_dataset_prob", "packing", "overlong", "train_thinking", "input_dir"),
    ),
    ("train.drawer.lora", ("lora",), ("rslora", "lora_target_modules")),
    ("train.drawer.optim", ("optim",), ("warmup_ratio", "max_grad_norm", "adam_beta2")),
    (
        "train.drawer.layout",
        ("parallel", "memory", "precision", "launch"),
        ("sharding_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "nproc_per_node"),
    ),
    ("train.drawer.saves", ("checkpoint", "tracking", "train"), ("max_evaluate_steps", "load_best_model_at_end")),
)  # fmt: skip
WIDE = ("model_name_or_path", "train_dataset_path", "output_dir", "eval_dataset_path")
OFFERS = ("model_name_or_path", "teacher_model_name_or_path", "train_dataset_path", "eval_dataset_path")
MORE_LINES = 4


class TrainPage:
    def __init__(self, context: PageContext) -> None:
        self.context = context
        self.forms: dict[str, Form] = {stage: form(page) for stage, page in STAGES.items()}
        with gr.Row(equal_height=False):
            with gr.Column(scale=6, min_width=420):
                self._form()
            with gr.Column(scale=5, min_width=420, elem_classes="ek-side"):
                self._side()
        self._wire()

    # ---- what is seen

    def _form(self) -> None:
        self.fields = FormFields("train", self.context, OFFERS)
        keys = {f.key: f for known in self.forms.values() for f in known.fields}
        self.source = RecipeSource(self.context)
        self.stage = StageChoice(self.context)
        with gr.Group():
            for row in FIRST:
                with gr.Row():
                    for key in row:
                        self._field(keys[key])
        shown = {key for row in FIRST for key in row}
        self.drawers: list[tuple[Any, list[str]]] = []  # with the keys in each
        for title, sections, further in DRAWERS:
            wanted = [f for f in keys.values() if f.section in sections and (f.basic or f.key in further)]
            self._drawer(title, [f for f in wanted if f.key not in shown])
        with self.context.labels.make(gr.Accordion, {"label": "train.drawer.more"}, open=False):
            self._more()

    def _field(self, spec: FieldSpec) -> None:
        options: dict[str, Any] = {"min_width": 300} if spec.key in WIDE else {}
        if spec.key == "output_dir":
            options.update(value="", texts={"placeholder": "train.own_folder"})
        self.fields.add(spec, visible=spec.key in self._keys_of(FIRST_STAGE), **options)

    def _drawer(self, title: str, specs: list[FieldSpec]) -> None:
        visible = any(spec.key in self._keys_of(FIRST_STAGE) for spec in specs)
        with self.context.labels.make(gr.Accordion, {"label": title}, open=False, visible=visible) as drawer:
            for at in range(0, len(specs), 3):
                with gr.Row():
                    for spec in specs[at : at + 3]:
                        self._field(spec)
        self.drawers.append((drawer, [spec.key for spec in specs]))

    def _more(self) -> None:
        """Advanced options: any other key, found by name, explained, and written into a piece of YAML."""
        labels = self.context.labels
        labels.heading("train.more.hint", elem_classes="ek-hint")
        with gr.Row(equal_height=True):
            self.more_key = labels.make(
                gr.Dropdown,
                {"label": "train.more.key"},
                choices=self._other_keys(FIRST_STAGE),
                value=None,
                elem_id="train-more-key",
                min_width=220,
            )
            self.more_value = labels.make(gr.Textbox, {"label": "train.more.value"}, elem_id="train-more-value")
            self.more_add = labels.make(gr.Button, {"value": "train.more.add"}, elem_id="train-more-add", min_width=80)
        self.more_help = gr.HTML("", elem_classes="ek-hint")
        self.more = labels.make(
            gr.Textbox, {"label": "train.more.keys"}, lines=MORE_LINES, elem_id="train-more", placeholder="key: value"
        )

    def _side(self) -> None:
        labels = self.context.labels
        with gr.Row():
            self.start = labels.make(gr.Button, {"value": "train.start"}, variant="primary", elem_id="train-start")
            self.preview_button = labels.make(gr.Button, {"value": "train.preview"}, elem_id="train-preview")
            self.doctor = labels.make(gr.Button, {"value": "train.doctor"}, elem_id="train-doctor")
        self.problems = gr.HTML("", elem_id="train-problems")
        with gr.Tabs(selected="recipe", elem_id="train-panes") as self.panes:
            with labels.make(gr.Tab, {"label": "train.pane.recipe"}, id="recipe"):
                self.command = labels.make(
                    gr.Code,
                    {"label": "recipe.command"},
                    value="erniekit train recipe.yaml",
                    language="shell",
                    interactive=False,
                    lines=1,
                    elem_id="train-command",
                )
                self.yaml = labels.make(
                    gr.Code,
                    {"label": "recipe.yaml"},
                    language="yaml",
                    interactive=False,
                    lines=12,
                    elem_id="train-yaml",
                    elem_classes="ek-recipe",
                )
                with gr.Row():
                    self.save = labels.make(gr.Button, {"value": "recipe.download"}, elem_id="train-download")
                    self.clear = labels.make(gr.Button, {"value": "recipe.clear"}, elem_id="train-clear")
            with labels.make(gr.Tab, {"label": "train.pane.data"}, id="data"):
                self.data = DataPreview(self.context)
            with labels.make(gr.Tab, {"label": "train.pane.doctor"}, id="doctor"):
                self.report = labels.empty("doctor.none", elem_id="train-report")
            with labels.make(gr.Tab, {"label": "train.pane.live"}, id="live"):
                self.live = JobMonitor(self.context, "train", "train")

    # ---- what happens

    def _wire(self) -> None:
        context = self.context
        stage = self.stage.choice
        form_inputs = [context.lang, stage, self.more, *self.fields.components]
        event_options = dict(outputs=[self.yaml, self.problems], show_progress="hidden", concurrency_limit=None)
        changes = [c.change for c in (stage, self.more, context.lang, *self.fields.components)]
        gr.on(changes, self._recipe, form_inputs, trigger_mode="always_last", **event_options)
        self.staged = [key for key in self.fields.specs if any(key not in self._keys_of(one) for one in STAGES)]
        of_stage = [self.more_key, *(drawer for drawer, _ in self.drawers), *map(self.fields.component, self.staged)]
        stage.change(self._show_stage, stage, of_stage, show_progress="hidden")
        stage.input(self._fine_tuning, stage, self.fields.component("fine_tuning"), show_progress="hidden")
        self.more_key.change(self._explain, [context.lang, self.more_key], self.more_help, show_progress="hidden")
        self.more_add.click(
            self._add, [self.more_key, self.more_value, self.more], [self.more, self.more_value], show_progress="hidden"
        )
        self.save.click(None, self.yaml, None, js="text => { erniekitSave(text, 'recipe.yaml'); }")
        self.form_outputs = [stage, self.more, *self.fields.components]
        self.source.wire(self.filled, self.form_outputs, self.fields.component("train_dataset_path"))
        self.clear.click(lambda: self.filled({}), None, self.form_outputs, show_progress="hidden")
        run_inputs = [context.lang, context.owner, *form_inputs[1:]]
        self.start.click(self._start, run_inputs, [self.panes, *self.live.outputs], concurrency_limit=None)
        for button, pane, handler, outputs in (
            (self.preview_button, "data", self._preview, self.data.outputs),
            (self.doctor, "doctor", self._doctor, [self.report]),
        ):
            button.click(_turn_to(pane), None, self.panes, show_progress="hidden").then(
                handler, form_inputs, outputs, show_progress="minimal", concurrency_limit=2
            )

    def on_open(self, page: Any) -> None:
        """A page is opened: the job its browser had started, the files there are now, and the form's recipe."""
        self.live.on_open(page)
        for handler, outputs in self.files():
            page.load(handler, None, outputs, show_progress="hidden")
        form_inputs = [self.context.lang, self.stage.choice, self.more, *self.fields.components]
        page.load(self._recipe, form_inputs, [self.yaml, self.problems], show_progress="hidden")

    def files(self) -> list[tuple[Any, list[Any]]]:
        return [self.fields.files(), self.source.files()]

    def _values(self, stage: str, raw: tuple[Any, ...]) -> dict[str, Any]:
        """Without the keys other stages have, whose fields are hidden."""
        known = self._keys_of(stage)
        return {key: value for key, value in self.fields.values(raw).items() if key in known}

    def _keys_of(self, stage: str) -> set[str]:
        return {f.key for f in self.forms[stage].fields}

    def _other_keys(self, stage: str) -> list[str]:
        """Keys of a stage that have no field of their own."""
        return sorted(self._keys_of(stage) - set(self.fields.specs))

    def _show_stage(self, stage: str) -> list[Any]:
        """What the stage reads is shown, the rest hidden."""
        known = self._keys_of(stage)
        drawers = [gr.update(visible=any(key in known for key in keys)) for _, keys in self.drawers]
        fields = [gr.update(visible=key in known) for key in self.staged]
        return [gr.update(choices=self._other_keys(stage), value=None), *drawers, *fields]

    def _fine_tuning(self, stage: str) -> str:
        """What the stage trains unless a recipe or the user decides otherwise."""
        return str(self.forms[stage].defaults()["fine_tuning"])

    def _recipe(self, lang: str, stage: str, more: str, *raw: Any) -> tuple[str, str]:
        text, problems = recipe(self._values(stage, raw), more or "", STAGES[stage], self.context)
        return public(text), problems_html(problems, lang)

    def _explain(self, lang: str, key: str | None) -> str:
        return f"<b>{key}</b> {label_of(key, lang)}. {help_of(key, lang)}" if key else ""

    def _add(self, key: str | None, value: str, more: str) -> tuple[Any, Any]:
        if not key or not value.strip():
            return gr.skip(), gr.skip()
        kept = [line for line in (more or "").splitlines() if not line.startswith(f"{key}:")]
        return "\n".join([*kept, f"{key}: {value.strip()}"]), ""

    def filled(self, values: dict[str, Any]) -> list[Any]:
        """The form set to a recipe's values; keys without a field go to the YAML under Advanced options."""
        if (given := values.get("stage", FIRST_STAGE)) not in STAGES:
            raise ConfigError(
                f"the page has no form for stage {given}", where="stage", fix="one of " + ", ".join(STAGES)
            )
        page = page_of("train", values)
        stage = next(stage for stage, name in STAGES.items() if name == page)
        other = {key: value for key, value in self.fields.without_field(values).items() if key != "stage"}
        fixed = set(self.forms[stage].fixed)
        more = "\n".join(line for line in to_yaml(other, page).splitlines() if line.partition(":")[0] not in fixed)
        implied = {} if "lora" in values else {"fine_tuning": self._fine_tuning(stage)}
        return [stage, more, *self.fields.updates({"output_dir": "", **implied, **values})]

    def _start(self, lang: str, owner: str, stage: str, more: str, *raw: Any) -> list[Any]:
        text, problems = recipe(self._values(stage, raw), more or "", STAGES[stage], self.context)
        if problems:
            raise gr.Error(problems_html(problems, lang), duration=12, print_exception=False)
        try:
            job = self.context.jobs.start("train", text, owner)
        except ErnieKitError as error:
            raise notice(error, lang) from None
        return [gr.update(selected="live"), *self.live.show(job, lang)]

    def _preview(self, lang: str, stage: str, more: str, *raw: Any) -> list[Any]:
        values = self._values(stage, raw)
        try:
            given = {**values, **(from_yaml(more) if more else {})}
        except ErnieKitError as error:
            return self.data.failed(as_problem(error), lang)
        return self.data.shown(given, stage, lang)

    def _doctor(self, lang: str, stage: str, more: str, *raw: Any) -> str:
        text, problems = recipe(self._values(stage, raw), more or "", STAGES[stage], self.context)
        if problems:
            return problems_html(problems, lang)
        report = doctor(text, self.context.roots)
        return f'<pre class="ek-report {"good" if report.ok else "bad"}">{escape(report.text)}</pre>'


def _turn_to(pane: str) -> Any:
    return lambda: gr.update(selected=pane)
