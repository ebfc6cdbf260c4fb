"""A base model and a run's output folder with a trained adapter in it, as `erniekit train` leaves them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.probe import Probe
from erniekit.checkpoint.writer import publish
from erniekit.lora.adapter import adapter_of, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter


@pytest.fixture(scope="session")
def base(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ERNIE in the HF layout, in shards, with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("base") / "model"
    model = ModelFolder(paddle / "dense_old").build()
    write_model(folder, model.config, model.state_dict().__getitem__, max_shard_size=2e-4)
    for file in (paddle / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def save_checkpoint(output_dir: Path, step: int, base: Path, paddle: Path, scale_b: float = 1.0) -> Path:
    """A published LoRA checkpoint: adapter, probe, manifest."""
    model = ModelFolder(base).build()
    recorded = read_adapter(paddle / "dense_lora", model)
    attach(model, recorded)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".B"):
                param.mul_(scale_b)
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        probe = probes.measure(model, Probe(ids, ids.roll(-1)), f"cpu/float32/{torch.__version__}/one device")

    def write(folder: Path) -> None:
        write_adapter(folder, adapter_of(model, recorded.settings(model), base=str(base)), model)
        probes.save(folder, probe)
        (folder / "optimizer-rank-00000-of-00001.safetensors").write_bytes(b"moments")

    output_dir.mkdir(parents=True, exist_ok=True)
    return publish(output_dir, f"checkpoint-{step}", write)


@pytest.fixture
def run(tmp_path: Path, base: Path, paddle: Path) -> Path:
    """output_dir of a LoRA run with checkpoints at steps 5 and 10; the later one differs."""
    output_dir = tmp_path / "run"
    save_checkpoint(output_dir, 5, base, paddle, scale_b=0.5)
    save_checkpoint(output_dir, 10, base, paddle)
    return output_dir
