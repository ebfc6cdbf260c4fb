"""A tiny real model, tiny real data, and runs in this process: no download, a second each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.foreign_files import Ground
from support.recorded import tiny_folder, whole_rows


@pytest.fixture(scope="session")
def tiny_model(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded dense ERNIE (144 k weights) with its tokenizer, Paddle layout."""
    return tiny_folder(paddle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def rows(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded rows that are whole: 16 samples of 10 to 79 tokens at max_seq_len 96."""
    return whole_rows(paddle, tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture
def train(
    tiny_model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable:
    """train(output_dir, key=value, ...) -> RunResult, on the tiny model in fp32."""
    # Not in tmp_path, which may be the output folder: a run refuses one that holds anything else.
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path_factory.mktemp("cache")))

    def go(output: Path, **keys: object):
        import erniekit

        values = dict(
            model_name_or_path=tiny_model,
            train_dataset_path=rows,
            output_dir=output,
            fine_tuning="Full",
            compute_type="fp32",
            max_seq_len=96,
            max_steps=6,
            learning_rate=1e-3,
            gradient_accumulation_steps=3,
            dataloader_num_workers=2,
            report_to="none",
            device="cpu",
        )
        return erniekit.run("train", **{**values, **keys})

    return go


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def weights() -> Callable[[Path], dict[str, str]]:
    """File name -> sha256 of everything that holds weights or optimiser state in a folder."""
    return lambda folder: {p.name: sha(p) for p in sorted(Path(folder).glob("*.safetensors"))}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    made = Ground(tmp_path / "ground")
    yield made
    (made.folder / "locked").chmod(0o700) if (made.folder / "locked").exists() else None


@pytest.fixture
def words(tiny_model: Path, rows: Path) -> list[str]:
    """Keys of a short run on the tiny model, as words of the command line."""
    return [
        f"model_name_or_path={tiny_model}", f"train_dataset_path={rows}", "max_seq_len=96", "max_steps=4",
        "save_steps=1", "save_total_limit=2", "report_to=none", "device=cpu", "doctor=off", "compute_type=fp32",
    ]  # fmt: skip
