"""Rules on the learning rate, on when a run evaluates and on what it keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator

from erniekit.config.flat import KEYS
from erniekit.config.metrics import PREFIX, metrics_of
from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError
from erniekit.loss_table import PREFERENCE_KEYS
from erniekit.printable import counted
from erniekit.registry import nearest


def lr_scheduler_is_an_old_name(run: View) -> Iterator[Note]:
    old, kinds = run["lr_scheduler"], KEYS["lr_scheduler_type"].choices
    if old is None:
        return
    kind = "wsd" if re.fullmatch(r"wsd:\d+", old) else old
    if kind not in kinds or old == "wsd":
        fix = f"one of {', '.join(k for k in kinds if k != 'wsd')}, or wsd:N to hold the rate for N steps"
        raise ConfigError(f"lr_scheduler is {old!r}", where=run.origin("lr_scheduler"), fix=fix)
    if not run.given("lr_scheduler_type"):
        if run.compat.lr_scheduler_in_pretraining_only and run["stage"] in ("SFT", "DPO"):
            yield from run.remark("lr_scheduler", "without effect: ERNIEKit reads it in pre-training only")
        else:
            yield from run.set("lr_scheduler_type", kind, f"lr_scheduler is {old}")
    elif kind != run["lr_scheduler_type"]:
        yield from run.remark("lr_scheduler", f"without effect: lr_scheduler_type is {run['lr_scheduler_type']}")


def wsd_says_how_long(run: View) -> tuple[Note, ...]:
    if run["lr_scheduler_type"] == "wsd" and not (run["lr_scheduler"] or "").startswith("wsd:"):
        raise ConfigError(
            "lr_scheduler_type is wsd, but not for how many steps the rate is held",
            where=run.origin("lr_scheduler_type"),
            fix="lr_scheduler: wsd:N, N the steps at the full rate",
        )
    return ()


def a_run_has_steps(run: View) -> Iterator[Note]:
    if run["max_steps"] > 0 or not run["do_train"]:
        return
    if run["num_train_epochs"] == 0:
        raise ConfigError(
            "num_train_epochs is 0 and max_steps names no steps: nothing would be trained",
            where=run.origin("num_train_epochs"),
            fix="num_train_epochs: 1, or max_steps: N",
        )
    if run["max_steps"] == 0:
        yield from run.remark("max_steps", "without effect: num_train_epochs decides, as with -1")


def schedule_spans_the_run(run: View) -> Iterator[Note]:
    if run["decay_steps"] is None and run["max_steps"] > 0:
        yield from run.set("decay_steps", run["max_steps"], "max_steps", quiet=True)


def warmup_steps_beat_ratio(run: View) -> Iterator[Note]:
    if run["warmup_steps"] > 0 and run["warmup_ratio"] > 0:
        yield from run.set("warmup_ratio", 0.0, f"warmup_steps is {run['warmup_steps']}")


def warmup_fits_the_run(run: View) -> Iterator[Note]:
    warmup, steps = run["warmup_steps"], run["max_steps"]
    if run["do_train"] and 0 < steps <= warmup:
        reach = f"{steps / warmup:.0%} of learning_rate"
        yield from run.remark("warmup_steps", f"not over when the run ends at step {steps}: it reaches {reach}")


def min_lr_is_below_learning_rate(run: View) -> Iterator[Note]:
    if run["lr_scheduler_type"] in ("cosine", "wsd") and run["min_lr"] > run["learning_rate"]:
        yield from run.remark("min_lr", f"above learning_rate {run['learning_rate']:g}: the rate will rise")


def evaluation_needs_a_file(run: View) -> Iterator[Note]:
    if run["stage"] == "PT":  # a part of its documents
        if run["do_eval"] and run.given("eval_steps") and not run.given("evaluation_strategy"):
            yield from run.set("evaluation_strategy", "steps", "do_eval is True and eval_steps is given")
        return
    if run["stage"] not in ("SFT", "VL-SFT", "DPO", *PREFERENCE_KEYS):  # the others bring their own evaluation data
        return
    if not run["eval_dataset_path"]:
        yield from run.set("evaluation_strategy", "no", "no eval_dataset_path")
        yield from run.set("do_eval", False, "no eval_dataset_path")
    elif not run.given("evaluation_strategy") and not run.given("do_eval"):
        yield from run.set("do_eval", True, "eval_dataset_path is given: evaluated at the end")


def evaluation_has_steps(run: View) -> Iterator[Note]:
    strategy = run["evaluation_strategy"]
    if strategy == "steps" and run["eval_steps"] is None:
        yield from run.set("eval_steps", run["save_steps"], "not given: as often as save_steps")
    if strategy != "no":
        yield from run.set("do_eval", True, f"evaluation_strategy is {strategy}", quiet=True)


def evaluate_often_enough(run: View) -> Iterator[Note]:
    times, steps, every = run["minimum_eval_times"], run["max_steps"], run["eval_steps"]
    if times and steps > 0 and every and every > max(1, steps // times):
        yield from run.set("eval_steps", max(1, steps // times), f"minimum_eval_times is {times}")


def best_model_needs_evaluation(run: View) -> Iterator[Note]:
    for name in ("load_best_model_at_end", "early_stopping_patience"):
        if not run[name]:
            continue
        if run["evaluation_strategy"] == "no":
            raise ConfigError(
                f"{name} is {run[name]}, but nothing is evaluated during training",
                where=run.origin(name),
                fix="set eval_dataset_path, evaluation_strategy: steps and eval_steps",
            )
        metric = run["metric_for_best_model"] or "loss"
        yield from run.set("metric_for_best_model", metric, f"{name} is {run[name]}", quiet=True)


def metric_says_which_is_better(run: View) -> Iterator[Note]:
    """An unknown one would never be found in an evaluation: no best model, and no early stop."""
    metric = run["metric_for_best_model"]
    if not metric or not run["do_train"]:
        return
    known, name = metrics_of(run["stage"], run["loss_type"], run["eval_generate"] > 0), metric.removeprefix(PREFIX)
    if name not in known:
        near = nearest(name, list(known))
        raise ConfigError(
            f"metric_for_best_model is {metric}; an evaluation of {run['stage']} reports {', '.join(known)}",
            where=run.origin("metric_for_best_model"),
            fix=f"did you mean {near[0]}?" if near else "use one of those",
        )
    if run["greater_is_better"] is None:
        yield from run.set("greater_is_better", known[name], f"metric_for_best_model is {metric}", quiet=True)


def keep_at_least_two(run: View) -> Iterator[Note]:
    limit = run["save_total_limit"]
    if limit is not None and limit < 1:
        yield from run.set("save_total_limit", None, "below 1 keeps all")
    elif limit == 1:
        yield from run.set("save_total_limit", 2, "the newest may be the damaged one: two are kept")


def all_options_are_two(run: View) -> Iterator[Note]:
    """As ERNIEKit reads it: async_save is not among them."""
    name = "unified_checkpoint_config"
    if "enable_all_options" in run[name]:
        options = [*run[name], "skip_save_model_weight", "master_weight_compatible"]
        kept = tuple(option for option in dict.fromkeys(options) if option != "enable_all_options")
        yield from run.set(name, kept, "what enable_all_options sets")


def quantised_states_can_be_disabled(run: View) -> Iterator[Note]:
    if run["disable_ckpt_quant"]:
        yield from run.set("ckpt_quant_stage", "O0", "disable_ckpt_quant is True")


def saves_happen_within_the_run(run: View) -> Iterator[Note]:
    steps = run["max_steps"]
    if not run["do_train"] or steps <= 0:
        return
    if run["save_strategy"] == "steps" and run.given("save_steps") and run["save_steps"] > steps:
        yield from run.remark("save_steps", f"beyond the run of {counted(steps, 'step')}: saved once, at the end")
    if run["evaluation_strategy"] == "steps" and (run["eval_steps"] or 0) > steps:
        yield from run.remark("eval_steps", f"beyond the run of {counted(steps, 'step')}: evaluated once, at the end")
