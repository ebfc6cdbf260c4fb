"""The typed sections of a run, one topic each, in the order help and the config command show them."""

from __future__ import annotations

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

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "lora": LoraSection,
    "tuning": TuningSection,
    "optim": OptimSection,
    "precision": PrecisionSection,
    "memory": MemorySection,
    "checkpoint": CheckpointSection,
    "tracking": TrackingSection,
    "export": ExportSection,
    "quantize": QuantizeSection,
    "serve": ServeSection,
    "parallel": ParallelSection,
    "launch": LaunchSection,
    "dpo": DpoSection,
    "distill": DistillSection,
    "score": ScoreSection,
    "moe": MoeSection,
    "quant": QuantSection,
    "vision": VisionSection,
}
