"""The table of training resources of ERNIEKit's guide, planned: docs/hardware/resources.md. No device is needed.

    python benchmarks/resources.py            # prints the page's table
    python benchmarks/resources.py --write    # puts it into the page

The guide's cards are those of examples/recipes.json. About a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from erniekit.cli.recipes_command import FACTS
from erniekit.config import load
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.search import search
from erniekit.progress import WorkProgress
from erniekit.recipes.plan_fits import Fitting
from erniekit.recipes.planning import packs_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "hardware" / "resources.md"
BEGIN, END = "<!-- table: benchmarks/resources.py -->", "<!-- end of the table -->"
CARD = "80G"
HEAD = (
    "| recipe | trains | rows | guide | planned | on the guide's cards: the fastest layout | GiB a rank | tokens/s |",
    "|---|---|---|---|---|---|---|---|",
)


def guide() -> dict[str, str]:
    """Recipes of the guide's table, with the cards that it names."""
    cards: dict[str, str] = json.loads((ROOT / "examples" / FACTS).read_text(encoding="utf-8"))["cards"]
    return {name: words for name, words in cards.items() if re.match(rf"\d+x{CARD}", words)}


def rows(names: Iterable[str] | None = None) -> Iterator[str]:
    """Lines of the table; names: of some recipes alone."""
    every, fits = guide(), Fitting(f"8x{CARD}")
    for name in every if names is None else names:
        cfg = load([str(ROOT / "examples" / f"{name}.yaml")], "train")
        count = int(every[name].partition("x")[0])
        job = replace(fits.job(cfg), packs=packs_of(cfg, count))
        # Machines of eight; fewer cards are one machine.
        found = search(job, DevicePool(fits.pool.card, fits.pool.rates, min(8, count)), count, shown=1)
        best = "nothing fits | | "
        if found.ranked:
            one = found.ranked[0]
            best = f"{one.layout.describe()} | {one.most.total / 2**30:.0f} | {_speed(one.tokens)}"
        kind = "" if cfg.precision.compute_type == "bf16" else f" {cfg.precision.compute_type}"
        trains = f"{cfg.train.stage}, {'LoRA' if cfg.lora.lora else 'all weights'}{kind}"
        short = name.removeprefix("configs/")
        yield (
            f"| {short} | {trains} | {cfg.data.max_seq_len // 1024}K | {every[name]} | {fits(cfg).planned} | {best} |"
        )


def _speed(tokens: float) -> str:
    """Two digits: data sheets know no more."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def page_with(lines: Iterable[str]) -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join((BEGIN, *HEAD, *lines, END)) + after


def table_of_page() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| ") and line not in HEAD]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given, lines = parser.parse_args(), []
    with WorkProgress("planning the guide's table", len(guide()), "recipes") as progress:
        for line in rows():
            lines.append(line)
            progress.print(line)
            progress.add()
    if given.write:
        PAGE.write_text(page_with(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
