"""Two nodes that were given different runs: both stop before the first step, naming what differs and where."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from erniekit.cli.train import train_command

sys.path.insert(0, str(Path(__file__).parent))

from launchers import Launcher, forked
from test_nodes_training import PATIENCE_S, curve, kill, stories

from faults.results import fault
from support.processes import alive
from support.recorded import tiny_folder, whole_rows

pytestmark = pytest.mark.xdist_group("nodes")


@dataclass
class Pair:
    """Two launchers on this machine that meet as the nodes of one job, each with folders of its own."""

    folder: Path
    paddle: Path
    started: list[Launcher] = field(default_factory=list)

    def disk(self, node: int) -> Path:
        disk = self.folder / f"node{node}"
        if not disk.exists():
            tiny_folder(self.paddle, disk / "model")
            whole_rows(self.paddle, disk / "rows.jsonl")
        return disk

    def train(self, *keys: dict[str, object]) -> list[Launcher]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for node, own in enumerate(keys):
            common = dict(
                model_name_or_path="model", train_dataset_path="rows.jsonl", output_dir="out", compute_type="fp32",
                fine_tuning="LoRA", max_seq_len=96, learning_rate=1e-3, max_steps=4, report_to="none", device="cpu",
                doctor="off", join_timeout_s=60, nproc_per_node=1, nnodes=2, node_rank=node,
                master=f"127.0.0.1:{port}", max_restarts=0,
            )  # fmt: skip
            self.started.append(forked(self.disk(node) / "said", self._command(node, {**common, **own})))
        return self.started[-2:]

    def _command(self, node: int, words: dict[str, object]) -> Callable[[], int]:
        disk = self.disk(node)

        def command() -> int:
            os.chdir(disk)
            os.environ |= {"ERNIEKIT_CACHE": str(disk / "cache"), "OMP_NUM_THREADS": "1"}
            return train_command([f"{name}={value}" for name, value in words.items()])

        return command


@pytest.fixture
def pair(paddle: Path, tmp_path: Path) -> Iterator[Pair]:
    nodes = Pair(tmp_path, paddle)
    yield nodes
    for launcher in nodes.started:
        if alive(launcher.pid):
            kill(launcher)


def edit(disk: Path) -> None:
    """One row of the data and one tensor of the model."""
    lines = (disk / "rows.jsonl").read_text().splitlines(keepends=True)
    (disk / "rows.jsonl").write_text("".join([*lines[:-1], lines[0]]))

    file = next((disk / "model").glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(tensors)[len(tensors) // 2]
    tensors[name] = tensors[name] * 1.25
    save_file(tensors, file)


def nothing(disk: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("keys", "change", "named"),
    [
        pytest.param(
            dict(learning_rate=2e-3, seed=7),
            nothing,
            ("learning_rate: 0.001 on node 0", "seed: 42 on node 0"),
            marks=pytest.mark.full,
        ),
        pytest.param(dict(max_steps=6), nothing, ("max_steps: 4 on node 0", "6 on node 1"), marks=pytest.mark.full),
        ({}, edit, ("train data", "base model")),
        pytest.param(dict(save_steps=2), nothing, ("save_steps: 500 on node 0",), marks=pytest.mark.full),
        pytest.param(dict(gradient_accumulation_steps=2), nothing, ("gradient_acc",), marks=pytest.mark.full),
    ],
    ids=["keys", "steps", "content", "saves", "batch"],
)
@pytest.mark.full
def test_nodes_that_were_given_different_runs_stop_before_the_first_step(
    keys: dict[str, object], change: Callable[[Path], None], named: tuple[str, ...], pair: Pair
) -> None:
    change(pair.disk(1))
    with fault("R4", "two nodes, each with settings, steps, data and weights, saves or a batch of its own") as row:
        launchers = pair.train({}, keys)
        codes = [launcher.wait(PATIENCE_S) for launcher in launchers]
        assert codes == [2, 2], stories(launchers)
        for launcher in launchers:
            said = "\n".join(launcher.said())
            assert "do not train the same" in said
            for words in (*named, "on node 1 (rank 1, "):
                assert words in said
            assert "Traceback" not in said
        row.count = row.hits = 1
        row.note = "both stop before the first step and name what differs, and where"
    for node in range(2):
        assert not list((pair.disk(node) / "out").glob("checkpoint-*"))
        metrics = pair.disk(node) / "out" / "metrics.jsonl"
        assert not metrics.exists() or not curve(metrics.parent), "not one step"


@pytest.mark.full
def test_nodes_with_the_same_content_at_other_places_are_one_run(pair: Pair) -> None:
    disk = pair.disk(1)
    (disk / "model").rename(disk / "copy of the model")
    (disk / "rows.jsonl").rename(disk / "mine.jsonl")
    os.utime(next((disk / "copy of the model").glob("*.safetensors")), (1, 1))
    config = json.loads((disk / "copy of the model" / "config.json").read_text())
    (disk / "copy of the model" / "config.json").write_text(json.dumps(config, indent=7))
    own = dict(model_name_or_path="copy of the model", train_dataset_path="mine.jsonl", output_dir="elsewhere")
    launchers = pair.train({"max_steps": 1}, {**own, "max_steps": 1})
    assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [0, 0], stories(launchers)
    assert len(curve(pair.disk(0) / "out")) == 1
