"""`erniekit recipes [NAME]`: the shipped recipes, what each trains, on what it was meant to run, and what has run.

Called by cli.main. Reads the recipes and examples/recipes.json; no model, no data, and no torch but for --fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from erniekit.cli.config_command import purpose, report
from erniekit.config import RunConfig, load, not_yet_supported
from erniekit.config.recipe_text import recipe_lines
from erniekit.config.sources import collect
from erniekit.errors import ConfigError
from erniekit.log import paint
from erniekit.progress import WorkProgress
from erniekit.registry import nearest

FACTS = "recipes.json"
READ = "resolves"  # what is proven of a recipe that has never run
# What answers --fits: made from the cluster as typed, called with a run, gives (planned, fits).
FITS = "erniekit.recipes.plan_fits:Fitting"
Fits = Callable[[RunConfig], tuple[str, str]]


@dataclass(frozen=True)
class RecipeRow:
    """One line of the list. `cards` is what ERNIEKit's guides name, `proven` what has run here."""

    name: str  # its path under examples/, without .yaml
    stage: str  # of a recipe that trains; else its command
    model: str
    method: str
    length: str
    cards: str
    proven: str
    not_yet: str = ""  # what it needs and this version lacks
    planned: str = ""  # the fewest cards that it fits by plan
    fits: str = ""  # on the cluster of --fits


PLANNED = ("planned", "fits")
COLUMNS = ("name", "stage", "model", "method", "length", "cards", "proven")


def recipes_command(args: list[str]) -> int:
    arguments, cluster = _options(args)
    as_json, flat = "--json" in args, "--flat" in args
    folder = examples_folder()
    names = _chosen(arguments[0] if arguments else "", recipe_names(folder))
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if flat:
        print("\n".join(_flat(names, folder)))
        return 0
    if len(names) == 1 and arguments and not as_json and not cluster:
        print("\n".join(_one(names[0], folder, facts)))
        return 0
    runs = [_run(name, folder) for name in names]
    rows = [_row(name, cfg, facts) for name, cfg in zip(names, runs, strict=True)]
    if cluster:
        rows = _planned(rows, runs, cluster, quiet=as_json)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
    else:
        lines = [] if cluster else _lines(rows, COLUMNS)
        print("\n".join((*lines, "", *_legend(rows, facts))))
    return 0


def _planned(rows: list[RecipeRow], runs: list[RunConfig], cluster: str, quiet: bool) -> list[RecipeRow]:
    """With the planner's two columns; unless quiet, each line is printed as soon as it is known."""
    fits = _planner(cluster)
    columns, widths = (*COLUMNS, *PLANNED), _widths(rows, (*COLUMNS, *PLANNED))
    out: list[RecipeRow] = []
    if not quiet:
        print(paint(_line(columns, widths), "bold"), flush=True)
    with WorkProgress("planning recipes", len(rows), "recipes") as progress:
        for row, cfg in zip(rows, runs, strict=True):
            if cfg.command == "train":
                planned, fitting = fits(cfg)
                row = replace(row, planned=planned, fits=fitting)
            out.append(row)
            if not quiet:
                progress.print(_line([getattr(row, column) for column in columns], widths))
            progress.add()
    return out


def examples_folder() -> Path:
    """`examples` of the working folder, else those a wheel carries, else those of the checkout this runs from."""
    package = Path(__file__).resolve().parents[1]
    for place in (Path(), package, package.parents[1]):
        if (place / "examples" / FACTS).is_file():
            return place / "examples"
    raise ConfigError(
        "no recipes here",
        where=str(Path("examples") / FACTS),
        fix="install the package again, or go to a checkout of erniekit",
    )


def _options(args: list[str]) -> tuple[list[str], str]:
    arguments, cluster = [w for w in args if w not in ("--json", "--flat")], ""
    if "--fits" in arguments:
        at = arguments.index("--fits")
        cluster = arguments[at + 1] if at + 1 < len(arguments) else ""
        if not cluster:
            raise ConfigError("--fits needs a cluster", where="command line", fix="e.g. --fits 8x80G")
        arguments = arguments[:at] + arguments[at + 2 :]
    if len(arguments) > 1 or any(w.startswith("-") for w in arguments):
        wrong = next((w for w in arguments if w.startswith("-")), arguments[-1])
        raise ConfigError(
            f"cannot interpret {wrong!r}",
            where="command line",
            fix="erniekit recipes [NAME] [--json | --flat] [--fits 8x80G]",
        )
    return arguments, cluster


def _planner(cluster: str) -> Fits:
    module, _, attr = FITS.partition(":")
    found: Fits = getattr(import_module(module), attr)(cluster)
    return found


def recipe_names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def _chosen(pattern: str, names: list[str]) -> list[str]:
    """The recipe of that name or path, else all whose names contain the pattern."""
    plain = pattern.removesuffix(".yaml").removeprefix("./").removeprefix("examples/")
    exact = [name for name in names if plain and (name == plain or name == f"configs/{plain}")]
    found = exact or [name for name in names if plain.lower() in name.lower()]
    if not found:
        near = nearest(plain, names)
        fix = f"did you mean {near[0]}?" if near else "erniekit recipes lists all"
        raise ConfigError(f"no recipe is called {pattern!r}", where="command line", fix=fix)
    return found


def _run(name: str, folder: Path) -> RunConfig:
    path = str(folder / f"{name}.yaml")
    return load([path], purpose(load([path], "config")))


def _row(name: str, cfg: RunConfig, facts: dict[str, Any]) -> RecipeRow:
    trains = cfg.command == "train"
    kind = cfg.precision.compute_type
    method = cfg.lora.fine_tuning + ("" if kind == "bf16" else f" {kind}")
    return RecipeRow(
        name,
        cfg.train.stage if trains else cfg.command,
        Path(cfg.model.model_name_or_path or "-").name,
        method if trains else "-",
        _length(cfg.data.max_seq_len) if trains else "-",
        facts["cards"].get(name, "-"),
        next((p["word"] for p in _proofs(name, facts)), READ),
        "; ".join(dict.fromkeys(item.what for item in not_yet_supported(cfg) if item.stops)),
    )


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _proofs(name: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """What has run of it, the strongest first."""
    return [proof for proof in facts["proven"] if any(fnmatchcase(name, pattern) for pattern in proof["recipes"])]


def _lines(rows: Sequence[RecipeRow], columns: Sequence[str]) -> list[str]:
    widths = _widths(rows, columns)
    cells = ([getattr(row, column) for column in columns] for row in rows)
    return [paint(_line(columns, widths), "bold"), *(_line(each, widths) for each in cells)]


def _widths(rows: Sequence[RecipeRow], columns: Sequence[str]) -> list[int]:
    least = {"planned": len("1024x80G")}  # of lines that are printed before the next is known
    return [max(len(c), least.get(c, 0), *(len(getattr(row, c)) for row in rows)) for c in columns]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _legend(rows: Sequence[RecipeRow], facts: dict[str, Any]) -> list[str]:
    used = {row.proven for row in rows}
    legend = [f"{p['word']:<12} {p['what']}" for p in facts["proven"] if p["word"] in used]
    legend += [f"{READ:<12} read and resolved; never run"] if READ in used else []
    if missing := sum(bool(row.not_yet) for row in rows):
        legend.append(f"{missing} of {len(rows)} are refused by name when run: erniekit recipes NAME gives the reason")
    legend.append("cards        what ERNIEKit's own guides name; not measured here")
    if any(row.fits for row in rows):
        legend.append(
            "planned      the fewest such cards by plan, in any layout; erniekit plan RECIPE --cluster shows which"
        )
    return legend


def _flat(names: list[str], folder: Path) -> list[str]:
    """One recipe with all that its bases give, for places that take a single file, such as the web page."""
    if len(names) > 1:
        raise ConfigError("--flat prints one recipe", where="command line", fix=f"name one, such as {names[0]}")
    path = folder / f"{names[0]}.yaml"
    given = collect([str(path)], "config").given
    return [f"# {path}, with what its bases give.", *recipe_lines({name: g.value for name, g in given.items()})]


def _one(name: str, folder: Path, facts: dict[str, Any]) -> list[str]:
    cfg = _run(name, folder)
    proofs = [f"{p['word']}: {p['what']} ({p['by']})" for p in _proofs(name, facts)] or [f"{READ}; never run"]
    lines = [
        f"recipe     {folder / name}.yaml",
        *(f"base       {file}" for file in reversed(cfg.files[:-1])),
        f"cards      {facts['cards'].get(name, 'none named by ERNIEKit')}",
        *(f"{'proven' if not i else '':<11}{text}" for i, text in enumerate(proofs)),
        f"run        erniekit {cfg.command} {folder / name}.yaml",
        "",
    ]
    return [*lines, *report(cfg)]
