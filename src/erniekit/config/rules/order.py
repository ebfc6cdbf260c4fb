"""Rules on the order of training rows: mixtures that change at named steps, and rows ordered by difficulty."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.mix_schedule import stages_of
from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError
from erniekit.printable import counted

_OWN_ORDER = ("PT", "VL-SFT", "OCR-VL-SFT")  # stages whose data has another reader


def mixtures_change_at_steps(run: View) -> Iterator[Note]:
    entries = run["mix_schedule"]
    if not entries or not run["do_train"]:
        return
    where = run.origin("mix_schedule")
    _refuse_elsewhere(run, "mix_schedule")
    stages, files = stages_of(entries, f"mix_schedule: {where}"), len(run["train_dataset_path"])
    odd = next((stage for stage in stages if len(stage[1]) != files), None)
    if odd is not None:
        raise ConfigError(
            f"from step {odd[0]} on: {counted(len(odd[1]), 'share')}, and {counted(files, 'file')}",
            where=f"{where} and {run.origin('train_dataset_path')}",
            fix="give a share for each file of train_dataset_path, 0 to leave it out",
        )
    if files < 2 or run["mix_strategy"] != "random":
        raise ConfigError(
            "mix_schedule changes the shares of several files that are drawn at random",
            where=f"{where} and {run.origin('mix_strategy' if files > 1 else 'train_dataset_path')}",
            fix="name two files or more, with mix_strategy: random",
        )
    if stages[0][0] == 1 and run["train_dataset_prob"]:
        raise ConfigError(
            "train_dataset_prob holds until mix_schedule's first step, which is 1",
            where=f"{where} and {run.origin('train_dataset_prob')}",
            fix="keep one of them",
        )
    if 0 < run["max_steps"] < stages[-1][0]:
        yield from run.remark("mix_schedule", f"step {stages[-1][0]} is never reached: max_steps is {run['max_steps']}")


def a_curriculum_orders_rows(run: View) -> Iterator[Note]:
    if not run["do_train"]:
        return
    if not run["curriculum"]:
        if run.given("curriculum_epochs"):
            yield from run.remark("curriculum_epochs", "without effect: there is no curriculum")
        return
    _refuse_elsewhere(run, "curriculum")
    if run["packing"] and run["greedy_intokens"]:
        if run.given("greedy_intokens"):
            reason = f"packs are chosen from {run['buffer_size']} rows at a time: within those the order is lost"
            yield from run.remark("greedy_intokens", reason)
        else:
            yield from run.set("greedy_intokens", False, "curriculum: packs are filled in its order")


def _refuse_elsewhere(run: View, key: str) -> None:
    if run["stage"] in _OWN_ORDER:
        raise ConfigError(
            f"{key} is for rows of conversations and preferences; stage is {run['stage']}",
            where=run.origin(key),
            fix=f"leave {key} out",
        )
    if run.compat.erniekit_order:
        raise ConfigError(
            f"{key} and compat: erniekit both decide the order of rows",
            where=f"{run.origin(key)} and {run.origin('compat')}",
            fix="leave one of them out",
        )
