"""Plans of some shipped recipes in numbers: `python tests/support/plans.py > tests/data/plans.json` records them, which
a change of the planner's formulas or constants calls for, and a change of its speed does not."""

from __future__ import annotations

import json
from typing import Any

from erniekit.config import load
from erniekit.planner.cards import rates_of
from erniekit.planner.cluster import parse
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.evaluate import Candidate
from erniekit.planner.job import Job
from erniekit.planner.search import search, smallest
from erniekit.recipes.planning import job_of, packs_of, shape_of
from support.shipped import ROOT

SHOWN = 2
CASES = (
    ("ERNIE-4.5-0.3B/sft/run_sft_lora_8k", "8x80G"),
    ("ERNIE-4.5-21B-A3B/sft/run_sft_8k", "2x8xH200-141G"),
    ("ERNIE-4.5-21B-A3B/dpo/run_dpo_32k", "16xBI150-32G"),
    ("ERNIE-4.5-300B-A47B/sft/run_sft_8k", "16x8xH100-80G"),
    ("ERNIE-4.5-300B-A47B/sft/run_sft_wint8mix_lora_8k", "4x80G"),
    ("xpu/ERNIE-4.5-300B-A47B/sft/run_sft_lora_8k", "16xP800-96G"),
    ("ERNIE-4.5-VL-28B-A3B/sft/run_sft_lora_128k", "8x80G"),
)


def job_on(recipe: str, cluster: str) -> tuple[Job, DevicePool, int]:
    """The run in numbers, where it would be, and on how many ranks."""
    cfg, where = load([str(ROOT / f"examples/configs/{recipe}.yaml")], "train"), parse(cluster)
    (island,) = where.islands
    job = job_of(cfg, shape_of(cfg), packs_of(cfg, where.size))
    return job, DevicePool(island.card, rates_of(island.card), island.devices), where.size


def planned(recipe: str, cluster: str) -> dict[str, Any]:
    job, site, ranks = job_on(recipe, cluster)
    found = search(job, site, ranks)
    return {
        "tried": found.tried,
        "fit": len(found.ranked),
        "ranked": [shown(one) for one in found.ranked[:SHOWN]],
        "tokens of all": digits(sum(one.tokens for one in found.ranked)),
        "bytes of all": digits(sum(one.most.total for one in found.ranked)),
        "nearest": shown(found.nearest) if found.nearest is not None else None,
        "rejected": {name: list(item) for name, item in found.failed.items()},
        "smallest": smallest(job, site, ranks),
    }


def shown(one: Candidate) -> dict[str, Any]:
    return {
        "layout": one.layout.describe(),
        "tokens": digits(one.tokens),
        "seconds": digits(one.seconds),
        "worst": digits(one.worst),
        "bytes": {name: digits(value) for name, value in one.most.shown().items()},
        "again": len(one.again),
    }


def digits(value: float) -> float:
    """As many as another processor's logarithm agrees in."""
    return float(f"{value:.9g}")


if __name__ == "__main__":
    print(json.dumps({f"{r} on {c}": planned(r, c) for r, c in CASES}, indent=1))
