"""Small models trained for a moment, dense and with experts, and rows to calibrate on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.data.collate import collate
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.types import Batch, Pack
from erniekit.demo.tiny import TRAIN, make_tiny_model
from erniekit.quant_schemes import QUANT_RECIPES
from erniekit.quantize.fit import fitted, require_plain
from erniekit.quantize.layer_weights import Method
from erniekit.quantize.run import QuantiseJob, quantise
from support.sources import open_source

STEPS = 12


@dataclass(frozen=True)
class Trained:
    folder: Path
    rows: list[Batch]  # a document each
    packs: list[Batch]  # 20 documents each


def train(folder: Path, family: str, cache: Path) -> Trained:
    make_tiny_model(folder, family=family)
    source = open_source(TRAIN, None, load_tokenizer(folder), max_seq_len=256, cache_dir=cache, num_proc=1)
    rows = [collate([Pack((source.sample(k),), 0)], pad_multiple=1) for k in range(len(source))]
    model = ModelFolder(folder).build().train()
    packs = [collate([Pack(tuple(source.sample(k) for k in range(s, s + 20)), 0)]) for s in range(0, 120, 20)]
    for step in range(STEPS):
        batch = packs[step % len(packs)]
        loss = model(batch.input_ids, batch.positions, batch.cu_seqlens, batch.max_doc, batch.labels)
        (loss / batch.num_label_tokens).backward()
        for weight in model.parameters():  # torch's own optimisers import its compiler, which takes seconds
            if weight.grad is not None:
                weight.data -= 2e-3 * weight.grad.sign()
                weight.grad = None
    write_model(folder, model.config, model.state_dict().__getitem__)
    return Trained(folder, rows, packs)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("dense")
    return train(place / "model", "ernie4_5", place / "cache")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("moe")
    return train(place / "model", "ernie4_5_moe", place / "cache")


Quantise = Callable[..., dict]


@pytest.fixture
def quantised(tmp_path: Path) -> Quantise:
    """quantised(trained, "w4a16", ...) -> the facts of the report; the folder is tmp_path / "out"."""

    def run(trained: Trained, quant: str, *, compensate: bool = True, rows: int = 2, out: str = "out", **more) -> dict:
        source = ModelFolder(trained.folder)
        require_plain(source)
        recipe = fitted(QUANT_RECIPES[quant], source.config, more.pop("group", None))
        job = QuantiseJob(
            trained.folder, tmp_path / out, quant, recipe, Method(compensate, more.pop("tokens", 24)),
            torch.device("cpu"), torch.float32, more.pop("calibrating", trained.rows[:rows]),
            more.pop("measuring", trained.rows[160:162]), **more,
        )  # fmt: skip
        return quantise(job)

    return run
