"""The recorded vision runs once more, by the trainer: keys -> build -> optimiser -> Trainer -> metrics.

The recorded curves cannot come from rows: their five batches (two rounds joined on purpose, a row of text that is in no
file, a pack cut by hand) were written down by the recorder, and no order of ERNIEKit's reader gives them in turn. So
the trainer is handed those batches; and single recorded rows go the whole way, from the file to the first loss, without
compat: there the last token of a row alone has position 0, which the recorded losses do not have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import erniekit
from erniekit.config import load
from erniekit.data.types import Batch
from erniekit.recipes import training
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.vl_sft import VisionStage
from support.jsonl import write_jsonl
from support.recorded_vision import FOLDER, layer_norms_as_in_paddle_on_a_cpu, numbers, recorded_batch
from support.seen import MEDIA, recorded, rows, tiny_seeing

CURVE, ROUTER_CURVE, LOSS = 5e-4, 2e-3, 1e-4  # the recording's own advice


class RecordedData(TrainData):
    """Reads rows as any run does, and trains on what was written down."""

    batches: list[Batch]

    def loader(  # type: ignore[override]
        self, cfg: Any, start_pack: int, steps: int | None = None
    ) -> Iterator[list[Batch]]:
        number = start_pack
        while True:
            yield [self.batches[number % len(self.batches)]]
            number += 1


class RecordedStage(VisionStage):
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def open_data(self, plan: Any, tokenizer: Any, output: Path) -> TrainData:
        data = RecordedData(**vars(super().open_data(plan, tokenizer, output)))
        object.__setattr__(data, "batches", [recorded_batch(name) for name in self.names])
        return data


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    args = recorded()["args"]
    shutil.copytree(MEDIA, tmp_path / "media")
    names = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "video_min_frames", "video_max_frames")
    return dict(
        stage="VL-SFT", model_name_or_path=tiny_seeing(tmp_path / "model"), output_dir=tmp_path / "out",
        train_dataset_path=write_jsonl(tmp_path / "rows.jsonl", [rows()["one_image"]]), cache_dir=tmp_path / "cache",
        compute_type="fp32", device="cpu", report_to="none", doctor="off", dataset_num_proc=1, media_num_proc=1,
        max_seq_len=256, compat="erniekit", variable_resolution=True, render_timestamp=args["render_timestamp"],
        gradient_accumulation_steps=1, lr_scheduler_type="constant", warmup_steps=0, logging_steps=1,
        fine_tuning="Full", **{name: args[name] for name in names},
    )  # fmt: skip


def losses(output: Path) -> list[float]:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


LAMBDAS = ("moe_aux_loss_lambda", "moe_z_loss_lambda", "moe_orthogonal_loss_lambda")


def of(run: dict[str, Any]) -> dict[str, Any]:
    how = run["hyper_parameters"]
    return dict(
        learning_rate=how["learning_rate"], adam_beta1=how["beta1"], adam_beta2=how["beta2"],
        adam_epsilon=how["epsilon"], weight_decay=how["weight_decay"], max_grad_norm=how["max_grad_norm"],
        max_steps=how["steps"], **dict.fromkeys(LAMBDAS, 0), moe_use_aux_free_update_coef=0,
    )  # fmt: skip


RUNS: dict[str, dict[str, Any]] = {"full": {}, "freeze_vision": dict(freeze_config="freeze_vision")}


@pytest.mark.parametrize("name", ["full", *(pytest.param(n, marks=pytest.mark.full) for n in RUNS if n != "full")])
def test_the_trainer_draws_the_recorded_curve(name: str, words: dict[str, Any]) -> None:
    run = numbers()["curves"][name]
    cfg = load([f"{key}={value}" for key, value in (words | of(run) | RUNS[name]).items()], "train")
    training.train(RecordedStage(run["batches"]), cfg, ["erniekit", "train"])
    assert losses(words["output_dir"]) == pytest.approx(run["loss"], abs=CURVE)


@pytest.mark.full
def test_the_trainer_draws_the_recorded_curve_with_router_losses_of_each_modality(words: dict[str, Any]) -> None:
    run, lambdas = numbers()["router"]["curve"], numbers()["router"]["lambdas"]
    keys = {name: lambdas[name][0] for name in LAMBDAS}
    keys |= {name.replace("moe_", "moe_vision_"): lambdas[name][1] for name in LAMBDAS}
    cfg = load([f"{key}={value}" for key, value in (words | of(run) | keys).items()], "train")
    training.train(RecordedStage(run["batches"]), cfg, ["erniekit", "train"])
    assert losses(words["output_dir"]) == pytest.approx(run["loss"], abs=ROUTER_CURVE)


@pytest.mark.full
def test_the_trainer_draws_the_recorded_lora_curve(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer_norms_as_in_paddle_on_a_cpu(monkeypatch)
    run = numbers()["lora"]["curve"]
    keys = dict(of(run), fine_tuning="LoRA", lora_path=FOLDER / "vl_lora", lora_rank=4, lora_alpha=8)
    cfg = load([f"{key}={value}" for key, value in (words | keys).items()], "train")
    training.train(RecordedStage(run["batches"]), cfg, ["erniekit", "train"])
    assert losses(words["output_dir"]) == pytest.approx(run["loss"], abs=CURVE)


@pytest.mark.parametrize(
    "case",
    ["one_image", *(pytest.param(n, marks=pytest.mark.full) for n in ("two_images", "two_turns", "thinking"))],
)
def test_a_recorded_row_gives_the_recorded_loss_from_its_file(case: str, words: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [rows()[case]])
    erniekit.run("train", **(words | dict(compat="", max_steps=1)))
    assert losses(words["output_dir"]) == pytest.approx([numbers()["cases"][case]["loss"]], abs=LOSS)
