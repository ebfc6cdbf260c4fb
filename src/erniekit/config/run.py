"""RunConfig: the whole run, frozen: typed sections, where each value came from, and what followed from what.

Made by config.load; handed around by the recipes; stored in checkpoints, run.json and the trackers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from erniekit.config.compat import COMPAT, Compat
from erniekit.config.convert import convert
from erniekit.config.flat import DEFAULTS, KEYS, build, canonical, suggest
from erniekit.config.ignored_keys import IGNORED_KEYS
from erniekit.config.note import Note
from erniekit.config.paddleformers import NO_COUNTERPART
from erniekit.config.sections.checkpoint import CheckpointSection
from erniekit.config.sections.data import DataSection
from erniekit.config.sections.distill import DistillSection
from erniekit.config.sections.dpo import DpoSection
from erniekit.config.sections.export import ExportSection
from erniekit.config.sections.launch import LaunchSection
from erniekit.config.sections.lora import LoraSection
from erniekit.config.sections.memory import MemorySection
from erniekit.config.sections.model import ModelSection
from erniekit.config.sections.moe import MoeSection
from erniekit.config.sections.optim import OptimSection
from erniekit.config.sections.parallel import ParallelSection
from erniekit.config.sections.precision import PrecisionSection
from erniekit.config.sections.quant import QuantSection
from erniekit.config.sections.quantize import QuantizeSection
from erniekit.config.sections.score import ScoreSection
from erniekit.config.sections.serve import ServeSection
from erniekit.config.sections.tracking import TrackingSection
from erniekit.config.sections.train import TrainSection
from erniekit.config.sections.tuning import TuningSection
from erniekit.config.sections.vision import VisionSection
from erniekit.errors import ConfigError
from erniekit.printable import HIDDEN, public


@dataclass(frozen=True)
class IgnoredKey:
    """A key that was given and does nothing here; or one such option (the value) of a key that holds several."""

    key: str
    value: Any
    origin: str

    @property
    def name(self) -> str:
        """The name a user would look for."""
        return str(self.value) if self._is_option else self.key

    @property
    def reason(self) -> str:
        if self.key in NO_COUNTERPART:
            return "off, as always here"
        return KEYS[self.key].idle[self.value] if self._is_option else IGNORED_KEYS.get(self.key, "of another version")

    @property
    def _is_option(self) -> bool:
        return self.key in KEYS and isinstance(self.value, str) and self.value in KEYS[self.key].idle


@dataclass(frozen=True)
class RunConfig:
    model: ModelSection
    data: DataSection
    train: TrainSection
    lora: LoraSection
    tuning: TuningSection
    optim: OptimSection
    precision: PrecisionSection
    memory: MemorySection
    checkpoint: CheckpointSection
    tracking: TrackingSection
    export: ExportSection
    quantize: QuantizeSection
    serve: ServeSection
    parallel: ParallelSection
    launch: LaunchSection
    dpo: DpoSection
    distill: DistillSection
    score: ScoreSection
    moe: MoeSection
    quant: QuantSection
    vision: VisionSection
    command: str = "train"
    files: tuple[str, ...] = ()  # recipes read
    origins: Mapping[str, str] = field(default_factory=dict)  # of every key that is not at its default
    notes: tuple[Note, ...] = ()
    ignored: tuple[IgnoredKey, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """The value of a flat key."""
        return getattr(getattr(self, KEYS[name].section), name)

    @property
    def compat(self) -> Compat:
        """Which of the old toolkit's behaviours this run repeats."""
        return COMPAT[self.train.compat]

    def origin(self, name: str) -> str:
        """`recipe.yaml:12`, `flag --x`, `key=value`, `argument`, `derived` or `default`."""
        return self.origins.get(name, "default")

    def given(self, name: str) -> bool:
        """Whether the user set it, rather than a default or a rule."""
        return self.origin(name) not in ("default", "derived")

    @property
    def compute_type_given(self) -> bool:
        """Whether the user chose it: by its own name, or as bf16 of the script form."""
        return self.given("compute_type") or (self["compute_type"] in ("bf16", "fp32") and self.given("bf16"))

    def typed(self, name: str) -> bool:
        """Whether it was given on the command line or as an argument, rather than by a recipe."""
        return self.given(name) and self.origin(name).rpartition(":")[0] not in self.files

    def typed_besides(self, names: Collection[str]) -> list[str]:
        """The keys that were typed and are not among these."""
        return [name for name in KEYS if name not in names and self.typed(name)]

    def flat(self) -> dict[str, Any]:
        """Every key and its value; secrets are hidden."""
        values = {name: self[name] for name in KEYS}
        return {n: HIDDEN if v and KEYS[n].secret else stored_value(v) for n, v in values.items()}

    def replace(self, **flat_keys: Any) -> RunConfig:
        """The same run with some values changed, typed like any input; rules are not applied again."""
        values, origins = {name: self[name] for name in KEYS}, dict(self.origins)
        for name, value in flat_keys.items():
            known = canonical(name)
            if known not in KEYS:
                raise ConfigError(f"unknown key {name!r}", where="replace", fix=f"nearest: {suggest(name)}")
            values[known] = convert(KEYS[known], value, "replace")
            origins[known] = "argument"
        return make_run(values, self.command, self.files, origins, self.notes, self.ignored)

    def derive(self, *notes: Note) -> RunConfig:
        """The same run after notes that came too late for the rules; one replaces an earlier one on its key."""
        values, origins, kept = {name: self[name] for name in KEYS}, dict(self.origins), list(self.notes)
        for note in notes:
            values[note.key] = note.new
            if note.changes:
                origins[note.key] = "derived"
            at = next((i for i, n in enumerate(kept) if n.key == note.key and n.changes), len(kept))
            old = kept[at].old if at < len(kept) else note.old
            kept[at : at + 1] = [replace(note, old=old)] if old != note.new else []
        return make_run(values, self.command, self.files, origins, tuple(kept), self.ignored)

    def resume_keys(self) -> dict[str, Any]:
        """The values that decide what the next step does: a resumed run must have the same."""
        return {name: _as_json(self[name]) for name, k in KEYS.items() if k.fixed}

    def to_dict(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "files": list(self.files),
            "values": {name: _as_json(value) for name, value in self.flat().items()},
            "origins": dict(self.origins),
            "notes": [{**asdict(n), "old": _as_json(n.old), "new": _as_json(n.new)} for n in self.notes],
            "inert": [{**asdict(i), "reason": i.reason} for i in self.ignored],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, stored: str | Mapping[str, Any]) -> RunConfig:
        """A stored run as it was; keys this version does not know are dropped, new ones take their default."""
        data = json.loads(stored) if isinstance(stored, str) else stored
        values = dict(DEFAULTS)
        for name, value in data["values"].items():
            if name in KEYS and not KEYS[name].secret:
                values[name] = convert(KEYS[name], value, "stored run")
        notes = tuple(_stored_note(n) for n in data.get("notes", ()))
        ignored = tuple(IgnoredKey(i["key"], i["value"], i["origin"]) for i in data.get("inert", ()))
        files = tuple(data.get("files", ()))
        return make_run(values, data.get("command", "train"), files, data.get("origins", {}), notes, ignored)


def make_run(
    values: Mapping[str, Any],
    command: str,
    files: tuple[str, ...],
    origins: Mapping[str, str],
    notes: tuple[Note, ...],
    ignored: tuple[IgnoredKey, ...],
) -> RunConfig:
    return RunConfig(**build(values), command=command, files=files, origins=dict(origins), notes=notes, ignored=ignored)


def stored_value(value: Any) -> Any:
    """Without passwords and signatures of addresses."""
    if isinstance(value, tuple):
        return tuple(map(stored_value, value))
    return public(value) if isinstance(value, str) else value


def _as_json(value: Any) -> Any:
    return [_as_json(v) for v in value] if isinstance(value, (list, tuple)) else value


def _stored_note(data: Mapping[str, Any]) -> Note:
    old, new = (tuple(v) if isinstance(v, list) else v for v in (data["old"], data["new"]))
    return Note(data["key"], old, new, data["reason"], data.get("quiet", False))
