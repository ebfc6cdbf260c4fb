"""The model card of an export, README.md: base and licence, data, keys, metrics and how to use it. Called by run.py.

Facts come from the run's own run.json and from the base's folder; what neither has is named as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from erniekit.errors import CheckpointError
from erniekit.files.json_file import read_value
from erniekit.printable import plain
from erniekit.version import __version__

FILE = "README.md"
RUN = "run.json"
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
_MOST = 64 << 10  # characters of a base's README that are looked at
_UNKNOWN = "not stated in the base's folder; look it up before you publish this model"
# Keys that a reader of a model card needs. Local paths are private and left out.
_KEYS = (
    "stage", "fine_tuning", "compute_type", "max_seq_len", "num_train_epochs", "max_steps", "batch_size",
    "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay",
    "lora_rank", "lora_alpha", "lora_target_modules", "packing", "seed",
)  # fmt: skip
# Methods that most runs do not set: shown where the run chose them.
_METHODS = (
    "optim", "train_only", "freeze", "use_dora", "lora_init", "rslora", "frozen_base", "neftune_noise_alpha",
    "curriculum", "mix_schedule", "distill_alpha", "distill_temperature", "distill_kl", "beta",
)  # fmt: skip
_METRICS = (
    "train_loss", "eval_loss", "eval_ppl", "eval_accuracy", "eval_rewards/accuracies",
    "best_metric", "global_step", "trained_tokens", "train_runtime",
)  # fmt: skip
_UNITS = {"train_runtime": "train_runtime (seconds)"}


def model_card(name: str, base: Path, adapters: Sequence[Path], gguf: str = "", classes: Sequence[str] = ()) -> str:
    """For a folder called `name`; classes: of its score head, where it has one. A README.md that the user wrote next to
    the trained weights is taken instead."""
    trained = adapters[-1] if adapters else base
    written = _text(trained / FILE)
    run = _run_of(trained)
    if written and (adapters or run):
        return written
    keys = {row["key"]: row["value"] for row in _list(run, "config") if {"key", "value"} <= set(row)}
    given = str(keys.get("model_name_or_path") or base)
    start = base if adapters else Path(given).expanduser()
    body = _body(name, trained, start, given, adapters, run, keys)
    use = _use_of_scores(name, classes) if classes else _use(name, gguf)
    return "\n".join([*_front(start, given, keys, gguf), "", *body, *use, ""])


def _front(start: Path, given: str, keys: Mapping[str, Any], gguf: str) -> Iterator[str]:
    """Fields that model hubs read."""
    yield "---"
    yield f"library_name: {'gguf' if gguf else 'transformers'}"
    if licence := licence_of(start):
        yield f"license: {licence}"
    if _is_id(given):
        yield f"base_model: {given}"
    values = (str(keys.get(key) or "").lower() for key in ("stage", "fine_tuning"))
    tags = ["erniekit", *(value for value in values if re.fullmatch(r"[\w-]+", value))]  # run.json may be another's
    yield f"tags: [{', '.join(tags)}]"
    yield "---"


def _title(name: str, trained: Path) -> str:
    """A folder called `export` is named after its run."""
    trained = trained.expanduser().resolve()
    run = trained.parent.name if re.fullmatch(r"checkpoint-\d+", trained.name) else trained.name
    return run if name == "export" and run else name


def _body(
    name: str,
    trained: Path,
    start: Path,
    given: str,
    adapters: Sequence[Path],
    run: Mapping[str, Any],
    keys: Mapping[str, Any],
) -> Iterator[str]:
    yield f"# {plain(_title(name, trained))}"
    yield ""
    few = {0: "all weights trained", 1: "one LoRA adapter merged"}
    merged = few.get(len(adapters), f"{len(adapters)} adapters merged")
    what = merged if run or adapters else "weights rewritten, not trained"
    yield f"Made by erniekit {plain(str(run.get('version') or __version__))}: {what}."
    yield ""
    yield f"- Base model: {plain(given if _is_id(given) else Path(given).name)}"
    yield f"- Licence of the base: {licence_of(start) or _UNKNOWN}"
    yield "- Licence of the training data: not known to erniekit; add it here"
    if run:
        yield from _data(run)
        chosen = {row.get("key") for row in _list(run, "config") if row.get("origin") != "default"}
        shown = [*_KEYS, *(("loss_type",) if keys.get("stage") == "DPO" else ()), *(k for k in _METHODS if k in chosen)]
        yield from _table("Keys", "key", {key: keys[key] for key in shown if _is_set(keys.get(key))})
        numbers = run.get("metrics")
        numbers = numbers if isinstance(numbers, dict) else {}
        found = {_UNITS.get(key, key): numbers[key] for key in _METRICS if _is_set(numbers.get(key))}
        yield from _table("Metrics", "metric", found)


def _data(run: Mapping[str, Any]) -> Iterator[str]:
    data = run.get("data")
    rows = [("train", r) for r in _list(data, "train")] + [("evaluation", r) for r in _list(data, "eval")]
    if not rows:
        return
    yield from ("", "## Data", "", "| file | use | rows | rows not used | tokens |", "|---|---|---|---|---|")
    for use, report in rows:
        bad = report.get("bad")
        lost = sum(n for n in bad.values() if isinstance(n, int)) if isinstance(bad, dict) else None
        file = _cell(_file_name(str(report.get("file", "?"))))
        yield f"| {file} | {use} | {_number(report.get('rows'))} | {_number(lost)} | {_number(report.get('tokens'))} |"


def _file_name(place: str) -> str:
    """Of a URL without its query, which may hold a signature."""
    return Path(urlsplit(place).path if "://" in place else place).name


def _use(name: str, gguf: str) -> Iterator[str]:
    yield from ("", "## Use", "")
    if gguf:
        yield f"`llama-cli -m {name}/model-{gguf.upper()}.gguf`, or `ollama create` with the Modelfile next to it."
        return
    yield from ("```bash", f"erniekit chat {name}", f"erniekit server {name}", "```", "")
    yield from ("```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield f'model = AutoModelForCausalLM.from_pretrained("{name}")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield "```"


def _use_of_scores(name: str, classes: Sequence[str]) -> Iterator[str]:
    what = "A reward model: one score of a text" if len(classes) == 1 else f"Scores of {len(classes)} classes"
    yield from ("", "## Use", "", f"{what}.", "")
    yield from ("```python", "from transformers import AutoModelForSequenceClassification, AutoTokenizer", "")
    yield f'model = AutoModelForSequenceClassification.from_pretrained("{name}")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield "```"


def _table(title: str, head: str, values: Mapping[str, Any]) -> Iterator[str]:
    if not values:
        return
    yield from ("", f"## {title}", "", f"| {head} | value |", "|---|---|")
    for key, value in values.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        shown = f"{shown:.6g}" if isinstance(shown, float) else str(shown)
        yield f"| {key} | {_cell(shown)} |"


def licence_of(folder: Path) -> str | None:
    """From the base's own card or licence file: `license:` of its README, else the file's title."""
    front = re.match(r"---\n(.*?)\n---", _text(folder / FILE), re.DOTALL)
    if front and (match := re.search(r"^license:\s*([\w.+-]+)\s*$", front[1], re.MULTILINE)):
        return match[1]
    for name in _LICENCES:
        text = _text(folder / name)
        if "Apache License" in text[:400] and "Version 2.0" in text[:400]:
            return "apache-2.0"
        if text.lstrip().startswith("MIT License"):
            return "mit"
        if text:
            return "other"
    return None


def _run_of(folder: Path) -> dict[str, Any]:
    """Its run.json; that of a checkpoint lies in the folder around it."""
    if folder.name.startswith("checkpoint-") and not (folder / RUN).is_file():
        folder = folder.parent
    try:
        run = read_value(folder / RUN, CheckpointError)
    except (OSError, CheckpointError):
        return {}
    return run if isinstance(run, dict) else {}


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""


def _is_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _list(record: Any, name: str) -> list[dict[str, Any]]:
    found = record.get(name) if isinstance(record, dict) else None
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _is_set(value: Any) -> bool:
    return value not in (None, "", [], -1)
