"""kill -9 while a model is quantised: finished layers are kept, and the result is the same to the byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint import writer
from erniekit.data.collate import collate
from erniekit.data.types import Batch, Pack, Sample
from erniekit.demo.tiny import TRAIN, make_tiny_model
from erniekit.quant_schemes import QUANT_RECIPES
from erniekit.quantize.layer_weights import Method
from erniekit.quantize.run import QuantiseJob, quantise


class Traced(writer.FileOps):
    """Counts the changes made to the disk; at the one asked for, the process is killed before it is made."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.count, self.kill_at = 0, kill_at

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("mkdir", "create", "write", "sync", "rename", "unlink", "rmdir"):
            self.count += 1
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "moe", family="ernie4_5_moe")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A forked child has none of the parent's threads, and must not wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def row() -> Batch:
    ids = torch.arange(3, 43).numpy().astype("int32")
    return collate([Pack((Sample(ids, ids),), 0)], pad_multiple=1)


def run(source: Path, out: Path, kill_at: int | None = None) -> int:
    """The number of changes made to the disk."""
    recipe, method = QUANT_RECIPES["w8a16"], Method(compensate=False, expert_tokens=4)
    before, writer.ops = writer.ops, Traced(kill_at)
    try:
        quantise(QuantiseJob(source, out, "w8a16", recipe, method, torch.device("cpu"), torch.float32, [row()]))
        return writer.ops.count
    finally:
        writer.ops = before


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("one_thread")
def test_killed_anywhere_it_goes_on_to_the_same_bytes_and_leaves_nothing_else(source: Path, tmp_path: Path) -> None:
    changes = run(source, tmp_path / "whole")
    wanted, kept = tree(tmp_path / "whole"), set()
    for point in range(2, changes, changes // 4):
        place = tmp_path / f"killed-{point}"
        child = os.fork()
        if child == 0:
            try:
                run(source, place / "out", kill_at=point)
            finally:
                os._exit(1)  # not killed
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        kept.add(len(list((place / ".erniekit-out.layers").glob("layer-*"))))
        run(source, place / "out")
        assert tree(place / "out") == wanted
        left = {path.name for path in place.iterdir()} - {"out"}
        assert all(name.endswith(".lock") for name in left), left
    assert kept == {0, 1, 2}, "kills fell before the first layer, between the two, and behind them"


@pytest.mark.full
def test_the_command_killed_behind_its_first_layer_is_run_again_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "erniekit", "quantize", str(source), "quant=w4a16", "--data", str(TRAIN)]
    words += ["calibration_rows=24", f"cache_dir={tmp_path / 'cache'}"]

    def start(out: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*words, f"output_dir={out}"], stdout=subprocess.PIPE, env=environment)

    assert start(tmp_path / "whole").wait() == 0
    victim = start(tmp_path / "out")
    while not (tmp_path / ".erniekit-out.layers" / "layer-00000").exists():
        assert victim.poll() is None, "it must die of the kill, not finish first"
        time.sleep(0.002)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    again = start(tmp_path / "out")
    told = again.communicate()[0].decode()
    assert again.returncode == 0
    assert "1 layer is done already" in told
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
