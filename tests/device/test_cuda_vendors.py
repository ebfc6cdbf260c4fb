"""On a real card: what is tried at the start costs little and finds nothing missing; and a hostile vendor that says
cuda (tests/support/hostile) trains a model with experts to the CPU's losses, on plain paths that never wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from erniekit import capabilities
from erniekit.demo import tiny
from erniekit.devices import pick, probes
from erniekit.kernels.attention import attention
from erniekit.kernels.blocked_products import blocked_outer, blocked_product
from erniekit.kernels.grouped_gemm import outer_reference, product_reference

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")]
VENDOR = Path(__file__).resolve().parents[1] / "support" / "hostile"


def test_a_healthy_card_lacks_nothing_and_says_so_quickly() -> None:
    probes._known.clear()
    began = time.perf_counter()
    device = pick("gpu")
    seconds = time.perf_counter() - began
    assert (device.vendor, dict(device.lacks)) == ("nvidia", {})
    assert seconds < 20, f"{seconds:.2f} s; a first Triton kernel is compiled, later ones come from its cache"


def losses(output: Path) -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_a_hostile_vendor_that_says_cuda_trains_experts_to_the_cpus_losses(tmp_path: Path) -> None:
    tiny.make_tiny_model(tmp_path / "tiny", family="ernie4_5_moe")
    said = {}
    for device in ("hostile", "cpu"):
        env = {
            **os.environ,
            "ERNIEKIT_DEVICES": "hostile=hostile_card",
            "PYTHONPATH": f"{VENDOR}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        keys = dict(
            model_name_or_path=tmp_path / "tiny", train_dataset_path=tiny.TRAIN, output_dir=tmp_path / device,
            fine_tuning="Full", max_seq_len=256, max_steps=3, packing=True, cache_dir=tmp_path / "cache", device=device,
            report_to="none", dataset_num_proc=1, logging_steps=1, learning_rate=1e-3,
        )  # fmt: skip
        command = [sys.executable, "-m", "erniekit", "train", *(f"{key}={value}" for key, value in keys.items())]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        said[device] = done.stdout
    for word in ("products in bf16", "Triton kernels", "grouped product of experts", "attention over packed documents"):
        assert f"no {word} here" in said["hostile"], said["hostile"]
    assert losses(tmp_path / "hostile") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_plain_paths_give_the_definitions_and_never_wait_for_the_card() -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*shape, generator=draw).cuda() for shape in ((300, 32), (4, 32, 48)))
    ends = torch.tensor([100, 100, 230, 290], dtype=torch.int32).cuda()
    other = torch.randn(300, 48, generator=draw).cuda()
    q, k, v = (torch.randn(1, 300, heads, 32, generator=draw).cuda() for heads in (4, 2, 2))
    bounds = torch.tensor([0, 100, 230, 300], dtype=torch.int32).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # torch raises where a call would wait
    try:
        capabilities.set_lacks({"varlen": "tried"})
        product, outer = blocked_product(rows, weight, ends), blocked_outer(rows, other, ends)
        seen = attention(q, k, v, bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        capabilities.set_lacks({})
    close = {"atol": 1e-3, "rtol": 1e-3}
    torch.testing.assert_close(product, product_reference(rows, weight, ends), **close)
    torch.testing.assert_close(outer, outer_reference(rows, other, ends), **close)
    torch.testing.assert_close(seen, attention(q, k, v, bounds, backend="reference"), **close)
