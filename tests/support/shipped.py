"""The shipped recipes as tests go over them: which command each is for, on which cluster its seed document has it, and
a form of it that rehearses in seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from erniekit.config import RunConfig, load
from erniekit.recipes.planning import raw_shape

ROOT = Path(__file__).resolve().parents[2]
RECORDED: list[str] = list(json.loads((ROOT / "tests/data/recipes/erniekit-recipes.json").read_text())["recipes"])
PRE_TRAINING = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/pre-training").rglob("*.yaml"))
ALL = [*RECORDED, *PRE_TRAINING]
CARDS: dict[str, str] = json.loads((ROOT / "examples/recipes.json").read_text())["cards"]
# A card of each device, as the seed documents and vendors have them.
OF_DEVICE = {"npu": "Ascend-64G", "xpu": "P800-96G", "iluvatar_gpu": "BI150-32G"}
LENGTH = 2048
DEGREES = ("pipeline_parallel_degree", "tensor_parallel_degree", "sharding_parallel_degree", "context_parallel_degree")


def command_of(name: str) -> str:
    stem = Path(name).stem
    return next((c for c in ("eval", "export", "chat") if c in stem), "train")


def cluster_of(name: str, cfg: RunConfig) -> str:
    """As its guide says; else as many cards of its device as its degrees multiply to."""
    cards = CARDS.get(name.removeprefix("examples/").removesuffix(".yaml"), "").split(" ")[0]
    if "BI150" in cards:
        return "64xBI150-32G"  # 32 boards of two
    return cards or f"{ranks_of(cfg)}x{OF_DEVICE.get(cfg.train.device, '80G')}"


def ranks_of(cfg: RunConfig) -> int:
    """Sharding over all ranks there are is over one machine's."""
    known = math.prod(max(1, cfg[name]) for name in DEGREES)
    return known if cfg.parallel.sharding_parallel_degree >= 1 else max(8, known)


def cheap(name: str, folder: Path) -> list[str]:
    """What is typed after `rehearse`: the recipe with short rows, two micro-batches and as few layers as its stages and
    its kinds of layer need. All else is as it is, the width of the model too."""
    cfg = load([str(ROOT / name)])
    raw, _ = raw_shape(cfg)
    words = [name, f"max_seq_len={LENGTH}"]
    if cfg.parallel.sharding_parallel_degree < 1:
        words += ["--ranks", str(ranks_of(cfg))]
    if cfg.parallel.virtual_pp_degree <= 1:  # else they come in groups
        words += ["--micro-batches", "2"]
    stages = cfg.parallel.pipeline_parallel_degree * max(1, cfg.parallel.virtual_pp_degree)
    first = raw.get("moe_layer_start_index", 0)
    layers = max(stages, 2 + (max(first) if isinstance(first, list) else first))
    if cfg.parallel.pp_seg_method or cfg.model.model_config or layers >= raw["num_hidden_layers"]:
        return words
    model = folder / f"{Path(str(cfg.model.model_name_or_path)).name}-{layers}"
    model.mkdir(exist_ok=True)
    small: dict[str, Any] = {**raw, "num_hidden_layers": layers}
    for key in ("moe_layer_end_index",):
        if key in raw:
            small[key] = [layers - 1] * 2 if isinstance(raw[key], list) else layers - 1
    (model / "config.json").write_text(json.dumps(small))
    return [*words, f"model_name_or_path={model}"]
