"""`erniekit config RECIPE [key=value ...]`: the run as it would be, each value with where it came from.

Called by cli.main. Reads nothing but the recipe: no model, no data, no torch.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from erniekit.config import NotYetSupported, RunConfig, load, not_yet_supported
from erniekit.config.flat import KEYS
from erniekit.config.note import shown
from erniekit.config.run import stored_value
from erniekit.config.sections import SECTIONS
from erniekit.errors import ConfigError
from erniekit.log import paint

WIDTH = 118
_CELL = 54  # two values share a line when both fit


def config_command(args: list[str]) -> int:
    if args == ["--schema"]:
        from erniekit.config.schema import schema_text

        print(schema_text())
        return 0
    arguments, everything, as_json, command = _options(args)
    cfg = load(arguments, "config")
    cfg = load(arguments, command or purpose(cfg))
    if as_json:
        needs = [{"what": item.what, "key": item.key, "stops": item.stops} for item in not_yet_supported(cfg)]
        print(json.dumps({**cfg.to_dict(), "later": needs}, indent=1, ensure_ascii=False))
    else:
        print("\n".join(report(cfg, everything)))
    return 0


def purpose(cfg: RunConfig) -> str:
    """The command a recipe is for, from what it gives."""
    if cfg.data.train_dataset_path or cfg.data.input_dir or cfg.train.do_train:
        return "train"
    if cfg.data.eval_dataset_path:
        return "eval"
    if any(i.key == "hf_hub_id" for i in cfg.ignored) or cfg.given("max_shard_size"):
        return "export"
    return "chat" if cfg.given("max_new_tokens") or cfg.given("max_model_len") else "train"


def report(cfg: RunConfig, everything: bool = False) -> list[str]:
    """What a person reads: values by section, then what followed, what does nothing, and what is missing."""
    out = [_headline(cfg), ""]
    for section in SECTIONS:
        keys = [k for k in KEYS.values() if k.section == section and (everything or _is_shown(cfg, k.name))]
        out += _in_columns(section, [_cell(cfg, k.name) for k in keys])
    out.append("")
    notes = [str(n) for n in cfg.notes if everything or not n.quiet]
    out += _block("follows", notes)
    out += _block("does nothing", _inert_lines(cfg))
    out += _block("not yet", [_not_yet_line(cfg, item) for item in not_yet_supported(cfg)])
    return out if everything else [*out, paint("(--all shows every key, --json is for programs)", "dim")]


def _options(args: list[str]) -> tuple[list[str], bool, bool, str]:
    arguments, command = [w for w in args if w not in ("--all", "--json")], ""
    if "--schema" in arguments:
        raise ConfigError("--schema takes no other arguments", where="command line", fix="erniekit config --schema")
    if "--for" in arguments:
        at = arguments.index("--for")
        command = arguments[at + 1] if at + 1 < len(arguments) else ""
        if command not in ("train", "eval", "doctor", "export", "quantize", "split", "chat", "server"):
            raise ConfigError("--for needs a command", where="command line", fix="e.g. --for export")
        arguments = arguments[:at] + arguments[at + 2 :]
    if not arguments:
        raise ConfigError("no recipe given", where="command line", fix="erniekit config RECIPE.yaml [key=value ...]")
    return arguments, "--all" in args, "--json" in args, command


def _headline(cfg: RunConfig) -> str:
    kind = f"{cfg.train.stage}, {cfg.lora.fine_tuning}, {cfg.precision.compute_type}"
    files = f"  (:N is a line of {', '.join(cfg.files)})" if cfg.files else ""
    return paint(f"erniekit {cfg.command}: {kind}", "bold") + files


def _is_shown(cfg: RunConfig, name: str) -> bool:
    """Whether a value is shown: not at its default, and not a plain consequence."""
    if cfg[name] == KEYS[name].default:
        return False
    return cfg.given(name) or any(n.key == name and not n.quiet for n in cfg.notes)


def _cell(cfg: RunConfig, name: str) -> str:
    value = "***" if KEYS[name].secret and cfg[name] else shown(stored_value(cfg[name]))
    return f"{name} {value}  {_origin(cfg, cfg.origin(name))}"


def _origin(cfg: RunConfig, origin: str) -> str:
    path, colon, line = origin.rpartition(":")
    if colon and path in cfg.files:
        return f":{line}" if len(cfg.files) == 1 else f"{_short(path, cfg.files)}:{line}"
    return f"({origin})"


def _short(path: str, files: Sequence[str]) -> str:
    """A file's own name, or as much of its path as distinguishes it from the others."""
    parts = Path(path).parts
    for count in range(1, len(parts) + 1):
        tail = parts[-count:]
        if sum(Path(file).parts[-count:] == tail for file in files) == 1:
            return "/".join(tail)
    return path


def _in_columns(section: str, cells: list[str]) -> Iterator[str]:
    label, waiting = section, ""
    for cell in [*cells, ""]:
        fits = cell and len(cell) <= _CELL - 2
        if waiting and fits:
            yield f"{label:<11}{waiting:<{_CELL}}{cell}"
            label, waiting = "", ""
        elif waiting:
            yield f"{label:<11}{waiting}"
            label, waiting = "", cell if fits else ""
            if cell and not fits:
                yield f"{'':<11}{cell}"
        elif fits:
            waiting = cell
        elif cell:
            yield f"{label:<11}{cell}"
            label = ""


def _inert_lines(cfg: RunConfig) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for item in cfg.ignored:
        by_reason.setdefault(item.reason, []).append(item.name)
    return [f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]


def _not_yet_line(cfg: RunConfig, item: NotYetSupported) -> str:
    value = f"{item.key} {shown(item.value)} {_origin(cfg, item.origin)}"
    return f"{value}  {item.what}{' (stops the run)' if item.stops else ''}; {item.today}"


def _block(title: str, lines: Iterable[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        label = title if not i else ""
        wrapped = textwrap.wrap(line, WIDTH - 13, break_on_hyphens=False)
        for j, part in enumerate(wrapped):
            yield f"{label if not j else '':<13}{part}"
