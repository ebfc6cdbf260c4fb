"""Supervised fine-tuning on conversations with pictures and videos (`stage: VL-SFT`), full or LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.probe import Probe, with_picture
from erniekit.config import RunConfig, need
from erniekit.data.report import BadRowsFile, DataReport
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Batch
from erniekit.data.vision.collate import VisionCollate
from erniekit.data.vision.layout import tokens_of
from erniekit.errors import ConfigError
from erniekit.models.layers.vision_language import LOSS_PICTURES, LOSS_TEXT
from erniekit.parallel.mesh import World
from erniekit.recipes import vision_data
from erniekit.recipes.built import Built
from erniekit.recipes.check import Check
from erniekit.recipes.datasets import TrainData, eval_batches
from erniekit.recipes.run_plan import RunPlan
from erniekit.recipes.served_prompts import Compared
from erniekit.recipes.stage import Prepare, TrainingStage
from erniekit.recipes.vision_checks import picture_lines, picture_tokens, pixels_count, pixels_stay_inside
from erniekit.recipes.vision_features import feature_cache


class VisionStage(TrainingStage):
    def metric_names(self, cfg: RunConfig) -> tuple[str, ...]:
        return (LOSS_PICTURES, LOSS_TEXT)

    def open_data(self, plan: RunPlan, tokenizer: Tokenizer, output: Path) -> TrainData:
        check_model(plan.folder)
        return vision_data.open_vision_data(plan, tokenizer, output)

    def held_out(
        self,
        cfg: RunConfig,
        tokenizer: Tokenizer,
        bad_rows: BadRowsFile,
        world: World,
        model: ModelFolder | None = None,
    ) -> tuple[list[DataReport], Iterator[Batch]]:
        need(cfg, "eval_dataset_path")
        if model is not None:
            check_model(model)
        rules = vision_data.vision_rules(cfg, model.path if model is not None else None)
        sources = vision_data.vision_sources(cfg, "eval", tokenizer, rules, bad_rows)
        collate = vision_data.vision_collate(cfg, tokenizer, rules, 1)

        def batches() -> Iterator[Batch]:
            with collate:
                yield from eval_batches(cfg, list(sources), world, {"pad_id": tokenizer.pad_id or 0}, collate)

        return [source.report for source in sources], batches()

    def before_step(self, cfg: RunConfig, built: Built, data: TrainData) -> Prepare | None:
        return feature_cache(cfg, built, data)

    def probe(self, cfg: RunConfig, built: Built, first: Batch, tokenizer: Tokenizer) -> Probe:
        return with_picture(super().probe(cfg, built, first, tokenizer), picture_tokens(built, tokenizer))

    def extra_files(self, cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> dict[str, bytes]:
        return vision_data.proof_files(cfg, data, tokenizer)

    def proof_lines(self, folder: Path, tokenizer: Tokenizer) -> list[str]:
        return vision_data.proof_lines(folder, tokenizer)

    def more_checks(self, built: Built, tokenizer: Tokenizer, first: Batch) -> list[Callable[[], Check]]:
        shown = picture_tokens(built, tokenizer)
        return [lambda: pixels_stay_inside(built, shown), lambda: pixels_count(built.engine, first)]

    def picture_lines(self, built: Built, data: TrainData) -> list[str]:
        collate, samples = data.collate, data.pack(0).samples
        assert isinstance(collate, VisionCollate)
        assert collate.rules is not None
        media = samples[0].media
        counts = [tokens_of(medium, collate.rules) for medium in media.sources] if media is not None else []
        return list(picture_lines(samples[0], counts))

    def prompts(self, cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> Compared | None:
        return vision_data.first_prompts(cfg, data, tokenizer)


def check_model(folder: ModelFolder) -> None:
    """Tokenizers of text models have the tokens of pictures, too, so that nothing else would stop one."""
    if folder.config.vision is None:
        raise ConfigError(
            f"stage VL-SFT needs a vision-language model; this is a text model ({folder.spec.name})",
            where=str(folder.path),
            fix="name a folder of ERNIE-4.5-VL, or stage: SFT for rows without pictures",
        )


STAGE = VisionStage()
