"""Kinds of stored weights in whole runs: one that a package adds, and fp8 in every layout.

The added kind is one file and one entry point. It trains LoRA on a tiny MoE model on one and two ranks, is saved,
resumed and merged.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.demo.tiny import make_tiny_model
from erniekit.export.run import export
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.merge import row_updates
from support.merged import merged_tensor
from support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
HERE = Path(__file__).parent

KIND = '''
import torch
from erniekit.kernels.stored import Stored, WeightKind


class Sign(WeightKind):
    """The sign of each number, and for each row the largest one."""

    name = "sign"

    def pack(self, weight, agree=None):
        most = weight.abs().amax(-1, keepdim=True).float()
        return Stored(weight.sign().to(torch.int8), agree(most) if agree else most, kind=self.name)

    def unpack(self, weight, dtype):
        return (weight.data.float() * weight.scale).to(dtype)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pip would have installed it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sign_kind.py").write_text(KIND)
    info = folder / "sign_kind-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sign-kind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[erniekit.weight_kinds]\nsign = sign_kind:Sign\n")
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("moe"), family="ernie4_5_moe")


def train(package: str, model: str, rows: str, output: str, keys: dict[str, Any]) -> tuple[int, str]:
    """On a rank: the command, in a process that has the package."""
    from erniekit.cli.main import main
    from erniekit.weight_kinds import WEIGHT_KINDS

    if package not in sys.path:
        sys.path.insert(0, package)
        WEIGHT_KINDS._group = "erniekit.weight_kinds"  # a worker of earlier tests may have looked already
    values = dict(
        model_name_or_path=model, train_dataset_path=rows, output_dir=output, stage="SFT", fine_tuning="LoRA",
        lora_rank=4, learning_rate=5e-3, compute_type="fp32", max_seq_len=96, max_steps=4, save_steps=2,
        save_total_limit=-1, gradient_accumulation_steps=2, report_to="none", device="cpu", doctor="off",
    )  # fmt: skip
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["train", *(f"{key}={value}" for key, value in {**values, **keys}.items())])
    return code, said.getvalue()


def curve(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_a_kind_that_a_package_adds_trains_on_one_and_two_ranks_and_is_saved_resumed_and_merged(
    package: Path, moe: Path, rows: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    layouts = {"one": {}, "plain": dict(frozen_base="bf16"), "tp": dict(tensor_parallel_degree=2)}
    for name, keys in layouts.items():
        count = 2 if name == "tp" else 1
        given = {"frozen_base": "sign", **keys}
        for code, said in ranks.run(count, train, str(package), str(moe), str(rows), str(tmp_path / name), given):
            assert code == 0, said
    one, plain, two = (curve(tmp_path / name) for name in layouts)
    assert len(one) == 4
    assert one[-1] < one[0]
    assert max(abs(a - b) for a, b in zip(one, plain)) > 0.01, "another model than that of the plain weights"
    assert two == pytest.approx(one, abs=5e-6), "scales of rows whose columns are cut are those of the whole rows"

    (tmp_path / "again").mkdir()
    shutil.copytree(tmp_path / "one" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    keys = {"frozen_base": "sign", "resume_from_checkpoint": tmp_path / "again" / "checkpoint-2"}
    ((code, said),) = ranks.run(1, train, str(package), str(moe), str(rows), str(tmp_path / "resumed"), keys)
    assert code == 0, said
    assert curve(tmp_path / "resumed")[-2:] == one[-2:]

    merged = ModelFolder(export(moe, tmp_path / "one", tmp_path / "merged")).build().state_dict()
    base = ModelFolder(moe).build()
    updates = row_updates(base, read_adapter(tmp_path / "one", base))
    assert len(updates) == 10
    for name, weight in base.state_dict().items():
        assert torch.equal(merged[name], merged_tensor(weight, updates[name]) if name in updates else weight), name


FP8_LAYOUTS = {"experts2": (2, dict(sharding="stage1", sharding_parallel_degree=2, moe_group="data"))}
MORE = {
    "tp2": (2, dict(tensor_parallel_degree=2)),
    "stage1": (2, dict(sharding="stage1", sharding_parallel_degree=2)),
    "stage3": (2, dict(sharding="stage3", sharding_parallel_degree=2)),
    "pp2": (2, dict(pipeline_parallel_degree=2)),
    "cp2": (2, dict(context_parallel_degree=2)),
    "tp2 over experts": (2, dict(tensor_parallel_degree=2, moe_group="mp")),
}


@pytest.mark.parametrize("layout", [*FP8_LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_an_fp8_base_learns_the_same_in_every_layout(
    layout: str, moe: Path, rows: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    count, keys = {**FP8_LAYOUTS, **MORE}[layout]
    for name, ranks_of, more in (("one", 1, {}), ("several", count, keys)):
        per_rank = 2 if "sharding" in more else 1  # as many sequences a step
        given = {"frozen_base": "fp8", **more, **({"gradient_accumulation_steps": 1} if per_rank == 2 else {})}
        for code, said in ranks.run(ranks_of, train, "", str(moe), str(rows), str(tmp_path / name), given):
            assert code == 0, said
    one, several = curve(tmp_path / "one"), curve(tmp_path / "several")
    # Before any update: rows whose columns are on two ranks are rounded with two scales; else nothing is different.
    assert several[0] == pytest.approx(one[0], abs=0.03 if "tensor_parallel_degree" in keys else 1e-5)
    # Sums in another order then move some numbers of 4 bits to the next one, and each step learns from that.
    assert several == pytest.approx(one, rel=0.005)
