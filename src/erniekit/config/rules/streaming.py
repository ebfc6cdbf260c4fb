"""Rules of `streaming`: what a run cannot know while its rows are still being read."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError

_WHY = "streaming: how many rows there are is not known while they are read"
STAGES = ("SFT", "PT", "DPO", "RM", "CLS")
# Why the others read all rows first.
_STAGES = {
    "KTO": "each prompt is measured with the answer of a row from anywhere in the file",
    "VL-SFT": "rows with pictures are packed by their patches, which are counted first",
}
_EPOCHS = ("logging_strategy", "save_strategy", "evaluation_strategy")


def streams_have_no_known_end(run: View) -> Iterator[Note]:
    if not run["do_train"]:
        return
    if not run["streaming"]:
        if run.given("shuffle_buffer"):
            yield from run.remark("shuffle_buffer", "without effect: streaming is False")
        return
    where = run.origin("streaming")
    if run["max_steps"] <= 0:
        raise ConfigError(_WHY, where=where, fix="say how long to train: max_steps: N")
    if run["stage"] not in STAGES:
        why = _STAGES.get(run["stage"], "its rows are read first")
        raise ConfigError(
            f"stage: {run['stage']} does not stream: {why}",
            where=where,
            fix=f"leave streaming out, or stage: {' or '.join(STAGES)}",
        )
    if run["stage"] == "PT":
        _check_text(run, where)
    if run["stage"] == "CLS" and not run["class_labels"]:
        raise ConfigError(
            "streaming: the classes, by which the model's head is built, are not known while rows are read",
            where=where,
            fix="name them: class_labels: a,b,c",
        )
    if run["stage"] == "DPO" and run["reference_logps"] == "cached" and not run["reference_free"]:
        raise ConfigError(
            "streaming: reference_logps: cached measures all pairs before the first step",
            where=f"{where} and {run.origin('reference_logps')}",
            fix="reference_logps: live",
        )
    for key, fix in _refused(run):  # the first of them
        raise ConfigError(f"{_WHY}; {key} is {_shown(run[key])}", where=f"{where} and {run.origin(key)}", fix=fix)
    if run.given("num_train_epochs"):
        yield from run.remark("num_train_epochs", "without effect: with streaming max_steps decides")
    if run.given("dataset_num_proc"):
        yield from run.remark("dataset_num_proc", "without effect: with streaming rows are tokenised as they are read")
    if run.given("shuffle_buffer") and not run["random_shuffle"]:
        yield from run.remark("shuffle_buffer", "without effect: random_shuffle is False")


def _check_text(run: View, where: str) -> None:
    """What pre-training decides by the number of documents."""
    why, fix = "", ""
    if run["input_dir"] or run["data_filelist"]:
        why, fix = "token files are read where they lie, and need no streaming", "leave streaming out"
    elif run.given("split"):
        why = f"split: {run['split']} divides documents by their number, which is not known while they are read"
        fix = "leave split out: all documents are trained"
    elif (run["do_eval"] or run["evaluation_strategy"] != "no") and not run["eval_dataset_path"]:
        why, fix = "there is no part of the text left to evaluate on", "eval_dataset_path: FILE, or no evaluation"
    elif len(run["train_dataset_path"]) > 1 and not run.given("train_dataset_prob"):
        why = "several entries are blended by how many rows each has, which is not known while they are read"
        fix = "give shares: train_dataset_prob; or one folder or pattern, whose files follow each other"
    if why:
        raise ConfigError(f"streaming: {why}", where=where, fix=fix)


def _refused(run: View) -> Iterator[tuple[str, str]]:
    """(key, what to do) of keys that ask for all rows at once."""
    if run.compat.erniekit_order:
        yield "compat", "leave streaming or compat out"
    for key in _EPOCHS:
        if run[key] == "epoch":
            yield key, f"{key}: steps"
    if run["mix_strategy"].startswith("interleave"):
        yield "mix_strategy", "mix_strategy: random, or concat"
    for key in ("mix_schedule", "curriculum"):
        if run[key]:
            yield key, f"leave {key} or streaming out"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
