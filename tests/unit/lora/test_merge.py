from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.lora.adapter import LowRank, adapter_of
from erniekit.lora.inject import base_state
from erniekit.lora.merge import WeightUpdate, row_updates
from erniekit.lora.settings import LoRASettings
from support.merged import fold, merged_tensor

IDS = torch.arange(20).view(2, 10)


def test_merging_is_exact_in_fp32_and_rounds_once() -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 6).to(torch.bfloat16)
    A, B = torch.randn(2, 6).to(torch.bfloat16), torch.randn(4, 2).to(torch.bfloat16)
    exact = weight.double()
    exact[3:7] += 0.7 * B.double() @ A.double()
    merged = merged_tensor(weight, [WeightUpdate(3, 7, LowRank(A, B, 0.7))])
    # a product of two bf16 is exact in fp32: one rounding of the exact value, not one for each step
    assert torch.equal(merged, exact.to(torch.bfloat16))
    assert torch.equal(merged[:3], weight[:3])
    assert torch.equal(merged[7:], weight[7:])


def test_merging_leaves_the_base_tensor_alone() -> None:
    weight = torch.zeros(4, 4)
    merged_tensor(weight, [WeightUpdate(0, 4, LowRank(torch.ones(1, 4), torch.ones(4, 1), 1.0))])
    assert not weight.any()


@pytest.mark.parametrize("settings", [{}, {"shared_a": True}, {"targets": ["k_proj", "up_proj"]}, {"rslora": True}])
def test_a_folded_model_has_plain_linears_and_the_same_logits(ernie: nn.Module, trained, settings: dict) -> None:
    model = trained(ernie, LoRASettings.resolve(rank=3, **settings))
    want, names = model(IDS), list(base_state(model))
    folded = fold(model)
    assert list(folded.state_dict()) == names
    # merged against two GEMMs in fp32, on logits near 10
    torch.testing.assert_close(folded(IDS), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"shared_a": True}, {"targets": ["up_proj", "gate"]}])
def test_experts_are_folded_each_with_its_own_update_in_fp32(moe: nn.Module, trained, settings: dict) -> None:
    model = trained(moe, LoRASettings.resolve(rank=3, **settings))
    want, names, before = model(IDS), list(base_state(model)), moe.layers[2].mlp.experts.gate_up.weight.clone()
    pairs = moe.layers[2].mlp.experts.gate_up.pairs()
    key = "shared" if "shared" in pairs else "up_proj"
    A, B = pairs[key].A[5 * 3 : 6 * 3], pairs[key].B.view(8, -1, 3)[5][-24:]
    folded = fold(model)
    assert list(folded.state_dict()) == names
    torch.testing.assert_close(folded(IDS), want, atol=1e-4, rtol=0)
    exact = torch.addmm(before[6 * 48 - 24 : 6 * 48], B, A, alpha=2.0)  # expert 5's rows of up
    assert torch.equal(moe.layers[2].mlp.experts.gate_up.weight[6 * 48 - 24 : 6 * 48], exact)


def test_row_updates_name_only_the_weights_an_adapter_touches(paddle: Path, ernie: nn.Module, trained) -> None:
    settings = LoRASettings.resolve(rank=3, targets=["v_proj", "down_proj"])
    adapter = adapter_of(trained(ernie, settings), settings)
    folder = ModelFolder(paddle / "dense_old")
    with torch.device("meta"):
        empty = folder.spec.build(folder.config)
    updates = row_updates(empty, adapter)
    assert updates.keys() == {f"layers.{i}.{m}.weight" for i in range(3) for m in ("attn.qkv", "mlp.down")}
    (v,) = updates["layers.1.attn.qkv.weight"]
    assert (v.start, v.stop) == (192, 256)
