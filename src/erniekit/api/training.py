"""`erniekit.train`: a training run out of a Python session, with its own rows, callbacks and loss."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.api.run_folder import TrainingRun
from erniekit.config import Note, RunConfig
from erniekit.config import load as load_config
from erniekit.config.flat import is_known
from erniekit.data.given_rows import GivenRows
from erniekit.errors import ConfigError
from erniekit.log import drop_stray_rank
from erniekit.loss_table import IN_SESSION
from erniekit.losses.own_preference import PairLoss
from erniekit.recipes.own_loss import OwnLoss, loss_key, session_loss
from erniekit.recipes.run import run_train
from erniekit.recipes.score_heads import read_classes
from erniekit.recipes.session import Session, sorted_callbacks

_ARGUMENTS = ("data", "eval_data", "callbacks", "loss")  # of train, beside keys


def train(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    eval_data: Any = None,
    callbacks: Sequence[Any] = (),
    loss: Any = None,
    **keys: Any,
) -> TrainingRun:
    """Trains in this process, on one device, and returns the run.

    The same call again resumes from the last checkpoint. Errors are `erniekit.ErnieKitError` with `what`, `where` and
    `fix`.

    recipe: a .yaml or .json file, or a mapping of keys
    data, eval_data: rows as a list of dicts, a Hugging Face Dataset, a pandas DataFrame or any iterable of dicts, which
        is read to its end; or the path of a file, or several. Rows have the forms that files have (docs/data.md); they
        are written to output_dir, so that the run can be resumed and reports on them
    callbacks: `erniekit.Hook` objects (moments of the loop), `erniekit.Tracker` objects (what is logged), or functions
        that are called with each step's `erniekit.StepResult`
    loss: a function of `logits` [n, V] or `logprobs` [n], and `labels` [n], of n trained tokens, by these names; it
        returns the loss of each, [n]. They are summed and divided by the trained tokens of the whole step, as the
        built-in loss is, whatever the micro-batches. It is called with some of a step's tokens at a time. In stage DPO
        a function of `chosen_logps` and `rejected_logps` [n], of n pairs, and, where it takes them,
        `reference_chosen_logps`, `reference_rejected_logps`, `score_delta` [n] and `beta`, which returns the loss of
        each pair, [n]
    keys: any key of `erniekit train`, as Python values; they win over the recipe's
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "training handles Ctrl-C and SIGTERM, which only the main thread receives",
            where="train",
            fix="call it in the main thread, or in a process of its own",
        )
    hooks, trackers = sorted_callbacks(callbacks)
    files, given = _recipe(recipe)
    _refuse_mistyped_argument(keys)
    given |= keys
    rows: dict[str, GivenRows] = {}
    for argument, value in (("data", data), ("eval_data", eval_data)):
        found = _files(value)
        if value is None:
            continue
        key = {"data": "train_dataset_path", "eval_data": "eval_dataset_path"}[argument]
        if clash := [name for name in (key, argument) if name in given]:
            raise ConfigError(
                f"{argument} and the key {clash[0]} both name rows", where=argument, fix="give one of them"
            )
        if found is None:
            rows[argument] = GivenRows(value, argument)
            found = [str(_output(files, given) / rows[argument].name)]
        given[key] = found
    cfg = load_config(files, "train", given)
    own = None if loss is None else session_loss(cfg, loss)
    if own is not None:
        cfg = _with_loss(cfg, own)
    if cfg.train.stage == "CLS" and not cfg.score.class_labels and "data" in rows:
        cfg = _with_classes(cfg, rows["data"])
    # What a person can type to go on: not where this session holds a part of the run.
    alone = not hooks and not trackers and own is None
    words = ["erniekit", "train"] if alone else ["python:", "erniekit.train"]
    command = [*words, *files, *(f"{name}={_word(value)}" for name, value in given.items())]
    drop_stray_rank()
    result = run_train(cfg, command, session=Session(hooks, trackers, own, tuple(rows.values())))
    return TrainingRun(result.output_dir, result)


def _refuse_mistyped_argument(keys: Mapping[str, Any]) -> None:
    """Before the keys are read: what resembles an argument would be compared with names of keys alone."""
    for name in keys:
        near = [] if is_known(name) else difflib.get_close_matches(name, _ARGUMENTS, 1, cutoff=0.8)
        if near:
            raise ConfigError(f"unknown argument {name!r}", where="train", fix=f"did you mean {near[0]}?")


def _recipe(recipe: Any) -> tuple[list[str], dict[str, Any]]:
    """The words and the keys that it means."""
    if recipe is None:
        return [], {}
    if isinstance(recipe, Mapping):
        return [], dict(recipe)
    if not isinstance(recipe, (str, Path)):
        raise ConfigError(
            f"the first argument is a {type(recipe).__name__}, where a recipe belongs",
            where="recipe",
            fix="name what it is: train(data=ROWS, model_name_or_path=...)",
        )
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"{recipe} is not a recipe",
            where="recipe",
            fix="a .yaml or .json file, or keys: train(model_name_or_path=..., data=...)",
        )
    return [str(path)], {}


def _output(files: list[str], given: Mapping[str, Any]) -> Path:
    """output_dir as the run will have it."""
    return Path(load_config(files, "train", given).train.output_dir or "output").expanduser()


def _files(value: Any) -> list[str] | None:
    """Paths, where the argument names files instead of holding rows."""
    if isinstance(value, (str, Path)):
        return [str(value)]
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, (str, Path)) for one in value):
        return [str(one) for one in value]
    return None


def _with_loss(cfg: RunConfig, loss: OwnLoss) -> RunConfig:
    """The run under the name of its loss: a resumed one must have the same."""
    key = loss_key(cfg)
    if cfg.given(key):
        raise ConfigError(f"loss is given, and {key}: {cfg[key]}", where="loss", fix="give one of them")
    reason = "a function of this Python session"
    notes = [Note(key, cfg[key], f"{IN_SESSION}{loss.name}", reason, quiet=True)]
    if isinstance(loss, PairLoss) and not loss.needs_reference:
        told = (("reference_free", True), ("ref_model_update_steps", -1))
        notes += [Note(name, cfg[name], value, "it takes no reference", quiet=True) for name, value in told]
    return cfg.derive(*notes)


def _with_classes(cfg: RunConfig, rows: GivenRows) -> RunConfig:
    """They decide what is built, before the run's folder holds the rows."""
    with rows.as_file() as file:
        given = cfg.data.train_dataset_type
        classes = read_classes(cfg, [file], [None if name == "auto" else name for name in given])
    return cfg.derive(Note("class_labels", (), classes, "those of the given rows", quiet=True))


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
