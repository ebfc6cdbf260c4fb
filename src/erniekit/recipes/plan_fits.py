"""`erniekit recipes --fits 8x80G`: the fewest cards of a cluster's kind that a recipe is planned to fit.

Named by cli/recipes_command.py. Recipes that differ in nothing the planner counts are planned once, and those of one
model share its tensors.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from erniekit.config import RunConfig
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.planner.cards import rates_of
from erniekit.planner.cluster import parse
from erniekit.planner.device_pool import DevicePool
from erniekit.planner.job import Job
from erniekit.planner.search import smallest
from erniekit.planner.static_bytes import TensorBlocks
from erniekit.recipes.planning import ModelShape, four_bytes, job_of, raw_shape, shape_of

MOST = 2048  # cards: what fits no number of them up to this is reported to fit none


class Fit(NamedTuple):
    planned: str  # the fewest cards, as 2x80G
    fits: str  # on the requested cluster


class Fitting:
    def __init__(self, text: str) -> None:
        cluster = parse(text)
        if len(cluster.islands) > 1:
            raise ConfigError(
                "recipes are planned on one kind of device",
                where=f"--fits {text}",
                fix="erniekit plan RECIPE --cluster",
            )
        (island,) = cluster.islands
        self.size, self.pool = cluster.size, DevicePool(island.card, rates_of(island.card), island.devices)
        self._shapes: dict[str, ModelShape] = {}
        self._blocks: dict[str, TensorBlocks] = {}
        self._fewest: dict[Job, int | None] = {}

    @property
    def planned(self) -> int:
        """How many different jobs were planned so far."""
        return len(self._fewest)

    def __call__(self, cfg: RunConfig) -> Fit:
        try:
            count = self.fewest(cfg)
        except ErnieKitError as error:
            return Fit("-", f"not planned: {error.what}")
        if count is None:
            return Fit(f"above {MOST}", "no")
        return Fit(f"{count}x{self.pool.card.name}", "yes" if count <= self.size else "no")

    def fewest(self, cfg: RunConfig) -> int | None:
        job = self.job(cfg)
        if job not in self._fewest:
            self._fewest[job] = smallest(job, self.pool, MOST // 2)
        return self._fewest[job]

    def job(self, cfg: RunConfig) -> Job:
        """Of a step of any number of packs."""
        raw, _ = raw_shape(cfg)
        built = (cfg.model.model_config, cfg.model.num_nextn_predict_layers, cfg.vision.freeze_config, four_bytes(cfg))
        head = (cfg.train.stage, cfg.score.class_labels)
        which = f"{json.dumps(raw, sort_keys=True)} {cfg.lora!r} {built!r} {head!r}"
        if which not in self._shapes:
            self._shapes[which] = shape_of(cfg)
        job = job_of(cfg, self._shapes[which], packs=0)
        # Names of tensors follow from the shape; what is left is how they are stored.
        stored = replace(job.blocks.storing, trained=frozenset(), fp32=frozenset(), bits={})
        return replace(job, blocks=self._blocks.setdefault(f"{which} {stored!r}", job.blocks))
