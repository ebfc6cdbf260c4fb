"""Keys as a script or an old recipe gives them -> the keys of our recipe, with a remark on each that changes or goes.

Called by runs.py, once for each run of a script.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from erniekit.config import paddleformers
from erniekit.config.flat import KEYS, canonical, suggest
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.config.note import shown
from erniekit.config.sources import Sources

Kind = Literal["changed", "added", "dropped", "no counterpart", "mind"]
KINDS: tuple[Kind, ...] = ("changed", "added", "dropped", "no counterpart", "mind")


@dataclass(frozen=True)
class WrittenKey:
    """One key as it was written, and where."""

    name: str
    value: Any
    place: str  # file:line
    in_file: bool = False  # of a recipe, not of the command line
    open: bool = False  # the value is known only when the script runs
    secret: bool = False  # it is or holds one


@dataclass(frozen=True)
class Remark:
    kind: Kind
    place: str
    what: str  # as written
    why: str


# What the script form takes where a flag is not given and a recipe does not; examples/post-training reads it too.
SCRIPT_DEFAULTS = {
    "fine_tuning": ("Full", "the script trains every weight unless --lora is given"),
    "compute_type": ("fp32", "the script computes in fp32 unless --bf16 or --fp16 is given"),
    "num_samples_each_epoch": (100000, "the script's own number"),
    "train_dataset_path": ("examples/data/sft-train.jsonl", "the script's own file"),
    "eval_dataset_path": ("examples/data/sft-eval.jsonl", "the script's own file"),
}


@dataclass
class MigratedKeys:
    """The recipe's values by declared key, those of the launch apart, and what happened to the rest."""

    values: dict[str, Any]
    launch: dict[str, Any]
    places: dict[str, str]
    remarks: list[Remark]
    kept: int = 0


def migrated_keys(entries: Iterable[WrittenKey], stage: str = "", from_script: bool = False) -> MigratedKeys:
    sources = Sources()
    remarks: list[Remark] = []
    for entry in entries:
        remarks += _put(sources, entry)
    values = {name: given.value for name, given in sources.given.items()}
    places = {name: given.origin for name, given in sources.given.items()}
    written = {name: given.written for name, given in sources.given.items()}
    launch = {name: values.pop(name) for name in [*values] if KEYS[name].section == "launch"}
    out = MigratedKeys(values, launch, places, remarks)
    if stage and "stage" not in values:
        values["stage"] = stage
        out.remarks.append(Remark("added", "", f"stage: {stage}", "it is what the script trains"))
    for name in [*values]:
        if written.get(name, name) != name:
            what = f"{written[name]} {shown(values[name])}"
            out.remarks.append(Remark("changed", places[name], what, f"{name}: {shown(values[name])}, its name here"))
    _settle(out, from_script)
    remarked = {r.what.split()[0] for r in out.remarks}
    out.kept = sum(name in written and not {name, written[name]} & remarked for name in out.values)
    return out


def _put(sources: Sources, entry: WrittenKey) -> Iterator[Remark]:
    """Into `sources`, unless it does nothing here or is unknown."""
    written = entry.name.replace("-", "_")
    what = f"{written} {shown(entry.value)}" if entry.value is not True else written
    name = canonical(paddleformers.translated(written, entry.value)[0])
    if (name in KEYS and KEYS[name].secret) or entry.secret:
        yield Remark("dropped", entry.place, written, "a secret has no place in a recipe; set it in the environment")
    elif name in KEYS and entry.open:
        why = f"its value is known only when the script runs; give it after the recipe: {name}=VALUE"
        yield Remark("no counterpart", entry.place, what, why)
    elif name in KEYS:
        before = sources.given.get(name)
        sources.put(entry.name, entry.value, entry.place, in_file=entry.in_file)
        if before is not None and before.value != sources.given[name].value:
            old = f"{before.written} {shown(before.value)}"
            yield Remark("dropped", before.origin, old, f"given again in {entry.place}; the last counts")
    elif name in IGNORED_KEYS:
        yield Remark("dropped", entry.place, what, IGNORED_KEYS[name])
    elif name in paddleformers.NO_COUNTERPART:
        off = paddleformers.is_off(entry.value)
        why = "off, as always here" if off else paddleformers.NO_COUNTERPART[name]
        yield Remark("dropped" if off else "no counterpart", entry.place, what, why)
    else:
        near = suggest(name)
        why = f"no such key; nearest: {' or '.join(near)}" if near else "no such key, no similar key"
        yield Remark("no counterpart", entry.place, what, why)


def _settle(out: MigratedKeys, from_script: bool) -> None:
    """Old spellings become the current ones; options that do nothing are removed."""
    _precision(out)
    if "lora" in out.values:
        lora = out.values["lora"]
        _renamed(out, "lora", "fine_tuning", "LoRA" if lora else "Full")
    train, evaluate = "per_device_train_batch_size", "per_device_eval_batch_size"
    if "batch_size" not in out.values and train in out.values:
        size = out.values[train]
        if out.values.get(evaluate, size) == size:  # batch_size is of both
            _renamed(out, train, "batch_size", size)
            _dropped(out, evaluate, "it follows batch_size")
    _dropped(out, "do_train", "`erniekit train` trains")
    _dropped(out, "disable_tqdm", "the bar shows on a terminal only")
    if out.values.get("stage", "SFT") in ("SFT", "DPO"):
        _dropped(out, "lr_scheduler", "without effect in ERNIEKit's SFT and DPO; lr_scheduler_type counts")
    from_paddleformers = any(r.what.startswith("recompute_method") for r in out.remarks)  # of PaddleFormers
    if from_paddleformers and "recompute_granularity" in out.values and "recompute" not in out.values:
        out.values["recompute"] = True
        out.remarks.append(Remark("added", "", "recompute: True", "recompute_granularity by itself turns it on there"))
    for name in [*out.values]:
        _without_idle_options(out, name)
    out.remarks += _unusual(out)
    for name, (value, why) in SCRIPT_DEFAULTS.items() if from_script else ():
        unasked = name == "eval_dataset_path" and not out.values.get("do_eval")
        if name not in out.values and not unasked:
            out.values[name] = value
            out.remarks.append(Remark("added", "", f"{name}: {shown(value)}", why))


def _unusual(out: MigratedKeys) -> Iterator[Remark]:
    lora = out.values.get("fine_tuning", "LoRA") == "LoRA" and out.values.get("stage") != "PT"
    if lora and out.values.get("continue_training") is False:
        place = out.places["continue_training"]
        yield Remark("mind", place, "continue_training False", "adapters over random weights, as written")


def _precision(out: MigratedKeys) -> None:
    for name in ("bf16", "fp16"):
        if out.values.get(name) is True and "compute_type" not in out.values:
            why = "" if name == "bf16" else "fp16 training is not in this version, and bf16 needs no loss scale"
            _renamed(out, name, "compute_type", "bf16", why)
        elif name in out.values:
            _dropped(out, name, "compute_type sets it")
    if "compute_type" in out.values:
        _dropped(out, "scale_loss", "bf16 needs no loss scale")


def _renamed(out: MigratedKeys, old: str, new: str, value: Any, why: str = "") -> None:
    place, given = out.places[old], out.values.pop(old)
    what = old if given is True else f"{old} {shown(given)}"
    out.remarks.append(Remark("changed", place, what, f"{new}: {shown(value)}" + (f", {why}" if why else "")))
    if new not in out.values:
        out.values[new] = value
        out.places[new] = place


def _dropped(out: MigratedKeys, name: str, why: str) -> None:
    if name in out.values and name in out.places:
        value = out.values.pop(name)
        what = name if value is True else f"{name} {shown(value)}"
        out.remarks.append(Remark("dropped", out.places[name], what, why))


def _without_idle_options(out: MigratedKeys, name: str) -> None:
    idle = KEYS[name].idle
    if not idle:
        return
    idle_options = [option for option in out.values[name] if option in idle]
    for option in idle_options:
        out.remarks.append(Remark("dropped", out.places[name], f"{name} {option}", idle[option]))
    left = tuple(option for option in out.values[name] if option not in idle)
    if left:
        out.values[name] = left
    else:
        del out.values[name]
