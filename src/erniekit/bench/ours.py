"""This product, by the path a user's run takes: keys -> config -> recipes/build -> TrainStep. Called by turns.py."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from erniekit.bench.data import PictureIds
from erniekit.bench.picture_files import PictureFiles
from erniekit.bench.planned import planned
from erniekit.bench.recipe import run_keys
from erniekit.bench.runner import Runner, StepNumbers, Task
from erniekit.bench.weights import skewed_bias
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig, load, refuse_not_yet_supported
from erniekit.data.types import Batch
from erniekit.devices import pick
from erniekit.parallel.world import open_world
from erniekit.printable import counted
from erniekit.recipes import stage_of
from erniekit.recipes.build import build
from erniekit.recipes.built import Built
from erniekit.recipes.expert_layers import balance_hook
from erniekit.recipes.model_config import changes_of
from erniekit.recipes.optimiser import make_optimizer
from erniekit.recipes.run_plan import decide
from erniekit.recipes.stage import Prepare, TrainingStage
from erniekit.recipes.training import step_for
from erniekit.recipes.vision_data import media_processes
from erniekit.recipes.vision_features import seen_before
from erniekit.train.data_wait import DataWait
from erniekit.train.step import Launched

if TYPE_CHECKING:
    from erniekit.recipes.datasets import TrainData
    from erniekit.train.trainer import Trainer

OURS = "erniekit"


def run_config(task: Task) -> RunConfig:
    """A user's recipe for this workload: what it names, and defaults for the rest."""
    compute = "bf16" if task.dtype == torch.bfloat16 else "fp32"
    options = task.options
    keys = run_keys(task.workload, task.folder, compute, options.keys, task.hardware.vendor, options.seed)
    cfg = load([f"{key}={value}" for key, value in keys.items()], "train")
    refuse_not_yet_supported(cfg)
    return cfg


class Ours(Runner):
    name = OURS
    planned: dict[str, Any] | None = None  # what the planner expects; stays when all else is freed

    def build(self) -> None:
        cfg = run_config(self.task)
        device = pick(cfg.train.device, cfg.train.no_cuda)
        world = open_world(cfg.parallel, device, cfg.moe.moe_group)
        folder = ModelFolder(self.task.folder, weights=False, changes=changes_of(cfg, self.task.folder))
        plan = decide(cfg, device, world, folder).at_full_length()
        cfg = self.cfg = plan.config
        self.planned = planned(plan, self.task.steps[0].batch)
        self.note = "; ".join(note.reason for note in cfg.notes if note.key == "no_recompute_layers")
        stage = stage_of(cfg)
        built = self.built = build(plan, stage)
        if self.task.workload.skew:
            _skew(built)
        prepare = self._prepare(stage)
        optimizer = make_optimizer(cfg, built)
        # A schedule needs the length of the run; a constant rate does not use it.
        run = cast("TrainData", SimpleNamespace(max_steps=10**6))
        self.train_step = step_for(cfg, built, optimizer, run, prepare)
        self.loads = balance_hook(cfg, built)
        self.trainer = cast("Trainer", None)  # hooks are handed one; this one's does not look at it
        self.files, self.wait = self._files(), DataWait()
        self.before: Launched | None = None

    def _prepare(self, stage: TrainingStage) -> Prepare | None:
        """What a stage does before each step. Batches whose reference was computed beforehand go to `kept`."""
        self.kept: dict[int, Batch] = {}
        cached = self.cfg.dpo.reference_logps == "cached" and self.cfg.train.stage == "DPO"
        # There are no files to cache anything for.
        cfg = self.cfg.replace(reference_logps="live") if cached else self.cfg
        features = self.cfg.train.stage == "VL-SFT" and self.cfg.vision.vision_feature_cache == "on"
        cfg = cfg.replace(vision_feature_cache="off") if features else cfg
        prepare = stage.before_step(cfg, self.built, cast("TrainData", None))
        if features:
            self.kept = {place: seen_before(self.built, data.batch) for place, data in enumerate(self.task.steps)}
        if cached and prepare is not None:
            for place, data in enumerate(self.task.steps):
                (batch,) = prepare([data.batch])
                assert batch.pairs is not None
                assert batch.pairs.reference is not None
                self.kept[place] = replace(batch, pairs=replace(batch.pairs, reference=batch.pairs.reference.cpu()))
        return prepare

    def step(self, number: int) -> StepNumbers:
        """As train/trainer.py goes on: launch this step, then wait for the one before it."""
        place = number % len(self.task.steps)
        batches = [self.kept.get(place, self.task.steps[place].batch)]
        if self.files is not None:
            self.wait.request(time.perf_counter())
            batches = next(self.files.steps)
            self.wait.came(time.perf_counter())
        launched = self.train_step.launch(batches, number + 1)
        if self.loads is not None:
            self.loads.launched(self.trainer, launched)
        launched.send()
        if self.before is not None:
            self._settle(self.before, number - 1)
        self.before = launched
        return OurNumbers(launched)

    def _settle(self, launched: Launched, number: int) -> None:
        result = launched.result()
        if self.files is not None:
            self.waits[number] = self.wait.finished(result.finished_at)
        if self.loads is not None:
            self.loads.after_step(self.trainer, result)

    def _files(self) -> PictureFiles | None:
        rows, ids = self.task.workload.rows, PictureIds.of(self.task.workload.model)
        if not rows.in_files or ids is None:
            return None
        folder, processes = self.task.folder / "pictures", media_processes(self.cfg)
        folder.mkdir(exist_ok=True)
        self.note = counted(processes, "process decodes", "processes decode")
        return PictureFiles(rows, self.task.vocab, ids, folder, processes, self.task.options.seed)

    def close(self) -> None:
        files: PictureFiles | None = getattr(self, "files", None)  # half a build has none
        if files is not None:
            files.close()
        super().close()

    def probe_logits(self) -> torch.Tensor:
        # Another length than the steps': not worth a compilation, and the compiled layers' loss is compared anyway.
        with torch.compiler.set_stance("force_eager"):
            return self.built.engine.logits(self.task.probe())[0].float()

    def trainable(self) -> int:
        return self.built.trainable()

    def busiest(self) -> float | None:
        """The largest share of a layer's choices that one expert had."""
        moe = self.built.folder.config.moe
        if self.loads is None or moe is None:
            return None
        return self.loads.metrics()["moe_load"] / moe.experts


class OurNumbers(StepNumbers):
    def __init__(self, launched: Launched) -> None:
        self.launched = launched

    def values(self) -> dict[str, float]:
        result = self.launched.result()
        sides = {name: value for name, value in result.extras.items() if name.startswith("logps/")}
        return {"loss": result.loss, "grad_norm": result.grad_norm, **sides}


def _skew(built: Built) -> None:
    for name, param in built.parameters():
        if name.endswith("router.bias"):
            with torch.no_grad():
                param.copy_(skewed_bias(param.numel(), param.device))
