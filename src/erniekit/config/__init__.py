"""The run's configuration: flat ERNIEKit keys in, one frozen RunConfig out. No torch, no numpy in here.

Every command calls `load`; the recipes then call `need` and `refuse_not_yet_supported` before they start any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from erniekit.config.flat import DEFAULTS, KEYS
from erniekit.config.not_yet_supported import NotYetSupported, not_yet_supported, refuse_not_yet_supported
from erniekit.config.note import Note
from erniekit.config.paddleformers import RENAMED
from erniekit.config.world import accumulation_for, for_world
from erniekit.errors import ConfigError

if TYPE_CHECKING:
    from erniekit.config.run import IgnoredKey, RunConfig
    from erniekit.config.sources import Sources

__all__ = [
    "IgnoredKey", "NotYetSupported", "Note", "RunConfig", "accumulation_for", "for_world", "load", "need",
    "not_yet_supported", "refuse_not_yet_supported",
]  # fmt: skip


def load(args: list[str], command: str = "train", overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The run given by the arguments after `command`: files, --flags and key=value in any mix, then `overrides`."""
    from erniekit.config.resolve import resolve
    from erniekit.config.run import IgnoredKey, make_run
    from erniekit.config.sources import collect
    from erniekit.devices import check_variable

    check_variable()
    sources = collect(args, command, overrides)
    given = {name: g.value for name, g in sources.given.items()}
    values, notes = resolve({**DEFAULTS, **given}, sources, command)
    notes = [*_renamed(sources), *notes]
    origins = {name: g.origin for name, g in sources.given.items()}
    origins |= {n.key: "derived" for n in notes if n.changes}
    ignored = [IgnoredKey(name, g.value, g.origin) for name, g in sources.ignored.items()]
    idle = ((name, item) for name, k in KEYS.items() if k.idle for item in values[name] if item in k.idle)
    ignored += [IgnoredKey(name, item, origins[name]) for name, item in idle]
    return make_run(values, command, tuple(sources.files), origins, tuple(notes), tuple(ignored))


def _renamed(sources: Sources) -> list[Note]:
    """A remark for each key that was given under PaddleFormers' name for it."""
    renamed = ((name, g) for name, g in sources.given.items() if g.written in (*RENAMED, "template"))
    return [Note(name, g.value, g.value, f"{g.written} of PaddleFormers, {g.origin}") for name, g in renamed]


def need(cfg: RunConfig, *names: str) -> None:
    """Stop unless these keys have a value."""
    missing = [name for name in names if not cfg[name]]
    if missing:
        files = ", ".join(cfg.files) or "command line"
        fix = "; ".join(f"{name}: {KEYS[name].help}" for name in missing)
        if missing == ["eval_dataset_path"]:
            fix = "eval_dataset_path=FILE, the rows to evaluate"
            if cfg.given("train_dataset_path"):
                fix = f"eval_dataset_path={','.join(cfg.data.train_dataset_path)}: train_dataset_path is not read here"
        raise ConfigError(f"{' and '.join(missing)} must be given", where=files, fix=fix)


def __getattr__(name: str) -> Any:
    """RunConfig and IgnoredKey, imported on use: help needs only the keys and must answer at once."""
    if name in ("IgnoredKey", "RunConfig"):
        from erniekit.config import run

        return getattr(run, name)
    raise AttributeError(f"module 'erniekit.config' has no attribute {name!r}")
