"""FP8 training (QAT) on an NVIDIA card: its products run on tensor cores, near their definition, and exported files
give the logits that were trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.demo import tiny
from erniekit.kernels import fp8_qat
from erniekit.kernels.selection import force

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a card with fp8"
    ),
]
# Tensor cores add up in fewer bits than fp32 has, and both are rounded to bf16.
ONE_PRODUCT, WHOLE_MODEL = 0.01, 0.02


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def test_products_with_static_scales_are_those_of_their_definition() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(300, 256, device="cuda"), torch.randn(4, 128, 256, device="cuda") * 0.02
    xs, ws = fp8_qat.scale_of(fp8_qat.largest(x)), torch.stack([fp8_qat.scale_of(fp8_qat.largest(e)) for e in w])
    x8, w8 = fp8_qat.to_fp8(x, xs), torch.stack([fp8_qat.to_fp8(e, s) for e, s in zip(w, ws)])
    ends = torch.tensor([10, 10, 200, 300], dtype=torch.int32, device="cuda")
    found = []
    for how in ("tensor cores", "emulated"):
        force({"fp8 products": how})
        found.append(
            (
                fp8_qat.product(x8, xs, w8[0], ws[0], torch.bfloat16),
                fp8_qat.grouped(x8, xs, w8, ws, ends, torch.bfloat16),
            )
        )
    force({})
    for got, want in zip(*found):
        assert not torch.equal(got, want), "two ways of adding up"
        assert apart(got, want) < ONE_PRODUCT


def test_the_export_gives_the_logits_that_were_trained(tmp_path: Path) -> None:
    model = tiny.make_tiny_model(tmp_path / "model", family="ernie4_5_moe")
    run = tmp_path / "run"
    words = dict(
        model_name_or_path=model, train_dataset_path=tiny.TRAIN, output_dir=run, stage="SFT", fine_tuning="Full",
        max_seq_len=96, max_steps=4, report_to="none", device="gpu", doctor="off", save_steps=1000, learning_rate=2e-3,
        compute_type="fp8", apply_online_actscale_step=1, compile=False,  # a first compilation takes a minute
    )  # fmt: skip
    assert main(["train", *(f"{key}={value}" for key, value in words.items())]) == 0
    table = {row["operation"]: row["implementation"] for row in json.loads((run / "run.json").read_text())["kernels"]}
    assert table["fp8 products"] == "tensor cores"
    probe = probes.load(run)
    assert probe is not None
    assert probe.rows is not None
    assert main(["export", f"output_dir={run}"]) == 0
    with torch.no_grad():
        read = ModelFolder(run / "export").build(torch.bfloat16, "cuda").eval()
        got = read(probe.ids.to("cuda"))[0][-probes.KEPT_ROWS :].cpu()
    off = apart(got, probe.rows)
    assert off < WHOLE_MODEL
