"""Rules on the files that are read and on how many sequences make a step."""

from __future__ import annotations

from collections.abc import Iterator

from erniekit.config.note import Note
from erniekit.config.view import View
from erniekit.config.world import accumulation_for
from erniekit.errors import ConfigError
from erniekit.loss_table import PREFERENCE_KEYS
from erniekit.printable import counted


def training_files_agree(run: View) -> Iterator[Note]:
    yield from _files_agree(run, "train")


def evaluation_files_agree(run: View) -> Iterator[Note]:
    yield from _files_agree(run, "eval")


def _files_agree(run: View, side: str) -> Iterator[Note]:
    """One format and one share per file; what is missing is filled in."""
    path, kind, prob = (f"{side}_dataset_{what}" for what in ("path", "type", "prob"))
    count = len(run[path])
    if not count:
        return
    for name in (kind, prob):
        if len(run[name]) > 1 and len(run[name]) != count:
            raise ConfigError(
                f"{name} has {counted(len(run[name]), 'entry', 'entries')} for {counted(count, 'file')}",
                where=run.origin(name),
                fix="one entry per file, in the same order; a single entry applies to all",
            )
    if not run[kind]:
        yield from run.set(kind, ("auto",) * count, "detected from each file", quiet=True)
    elif len(run[kind]) < count:
        yield from run.set(kind, run[kind] * count, "one format for all files")
    if len(run[prob]) != count:
        share = round(1 / count, 6)
        yield from run.set(prob, (share,) * count, "equal shares", quiet=count == 1)
    elif not any(run[prob]):
        raise ConfigError(f"every {prob} is 0", where=run.origin(prob), fix="give at least one file a share")


def buckets_are_a_mode_or_lengths(run: View) -> Iterator[Note]:
    same = {"true": "on", "false": "off"}  # YAML's own names of on and off
    values = tuple(same.get(value.lower(), value.lower()) for value in run["length_buckets"])
    values = values or ("off",)
    numbers = [int(value) for value in values if value.isdecimal()]
    rising = len(numbers) == len(values) and numbers == sorted(set(numbers)) and numbers[0] > 0
    if not rising and values not in (("auto",), ("on",), ("off",)):
        raise ConfigError(
            f"length_buckets is {', '.join(values)}; expected auto, on, off, or rising numbers of tokens",
            where=run.origin("length_buckets"),
            fix="length_buckets: auto, or length_buckets: 4096,6144,8192",
        )
    yield from run.set("length_buckets", values, "the same value, normalised", quiet=True)


def prompt_fits_sequence(run: View) -> Iterator[Note]:
    limit = run["max_seq_len"] - 10
    reads = run["stage"] == "DPO" or "max_prompt_len" in PREFERENCE_KEYS.get(run["stage"], ())
    if reads and run["max_prompt_len"] > limit > 0:
        yield from run.set("max_prompt_len", limit, "max_seq_len - 10")


def script_batch_size_counts(run: View) -> Iterator[Note]:
    if run.wins("per_device_train_batch_size", "batch_size"):
        size = run["per_device_train_batch_size"]
        yield from run.set("batch_size", size, f"per_device_train_batch_size is {size}")


def batch_size_sets_per_device(run: View) -> Iterator[Note]:
    train, evaluate, reason = (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        f"batch_size is {run['batch_size']}",
    )
    yield from run.set(train, run["batch_size"], reason, quiet=not run.given(train))
    if not run.wins(evaluate, "batch_size"):
        yield from run.set(evaluate, run["batch_size"], reason, quiet=not run.given(evaluate))


def _data_ranks(run: View) -> int:
    """Devices that read different packs, as far as the recipe sets them. config.world has them all."""
    return max(1, run["data_parallel_degree"]) * max(1, run["sharding_parallel_degree"])


def global_batch_gives_accumulation(run: View) -> Iterator[Note]:
    want, batch, ranks = run["global_batch_size"], run["batch_size"], _data_ranks(run)
    kept = run["stage"] == "PT" and run.given("global_batch_size")  # whatever the accumulation was made for
    if want is None or (run.given("gradient_accumulation_steps") and not kept):
        return
    steps = accumulation_for(want, batch, ranks, run.origin("global_batch_size"))
    reason = f"global_batch_size {want} / {batch * ranks}; fewer on more data ranks"
    yield from run.set("gradient_accumulation_steps", steps, reason)


def accumulation_is_positive(run: View) -> tuple[Note, ...]:
    steps = run["gradient_accumulation_steps"]
    if steps < 1 and run["stage"] != "DPO":  # DPO: negative means by the size of the dataset
        raise ConfigError(
            f"gradient_accumulation_steps is {steps}; expected 1 or more",
            where=run.origin("gradient_accumulation_steps"),
            fix="1 takes one micro-batch per step",
        )
    return ()


def global_batch_follows(run: View) -> Iterator[Note]:
    size = run["batch_size"] * _data_ranks(run) * max(1, run["gradient_accumulation_steps"])
    reason = "batch_size x data ranks x gradient_accumulation_steps"
    yield from run.set("global_batch_size", size, reason, quiet=not run.given("global_batch_size"))
