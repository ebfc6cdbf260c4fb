"""Rules of `streaming`: what a run has no value for while its rows are still being read."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.errors import ConfigError

_WHY = "streaming: how many rows there are is not known while they are read"
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
        raise ConfigError(_WHY, where=where, fix="set the length of training: max_steps: N")
    for key, fix in _refused(run):  # the first of them
        raise ConfigError(f"{_WHY}; {key} is {_shown(run[key])}", where=f"{where} and {run.origin(key)}", fix=fix)
    if run.given("num_train_epochs"):
        yield from run.remark("num_train_epochs", "without effect: with streaming max_steps decides")
    if run.given("dataset_num_proc"):
        yield from run.remark("dataset_num_proc", "without effect: with streaming rows are tokenised as they are read")
    if run.given("shuffle_buffer") and not run["random_shuffle"]:
        yield from run.remark("shuffle_buffer", "without effect: random_shuffle is False")


def _refused(run: View) -> Iterator[tuple[str, str]]:
    """(key, what to do) of keys that need all rows at once."""
    if run["stage"] != "SFT":
        yield "stage", "leave streaming out, or stage: SFT"
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
