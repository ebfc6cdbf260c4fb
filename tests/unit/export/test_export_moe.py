"""Merging and exporting a model with experts: every layout, 16 bit, and a proof that finds one wrong expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.errors import CheckpointError
from erniekit.export.run import export
from erniekit.export.streamed import streamed
from erniekit.export.verify import SameExperts, prove
from erniekit.lora.adapter import Adapter, LowRank, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.merge import row_updates
from support.merged import merged_tensor

IDS = torch.arange(3, 43)[None]


@pytest.fixture
def adapter(paddle: Path, tmp_path: Path) -> Path:
    """The recorded adapter in PEFT's form."""
    model = ModelFolder(paddle / "moe_old").meta()
    write_adapter(tmp_path / "adapter", read_adapter(paddle / "moe_lora", model), model)
    return tmp_path / "adapter"


def test_streaming_one_layer_at_a_time_gives_the_whole_models_logits(paddle: Path, adapter: Path) -> None:
    folder = ModelFolder(paddle / "moe_new")
    loaded = read_adapter(adapter, folder.meta())
    whole = folder.build()
    attach(whole, loaded)
    with torch.no_grad():
        assert torch.equal(streamed(folder, loaded)(IDS), whole.eval()(IDS))


def test_every_layout_holds_base_plus_update_of_each_expert(paddle: Path, adapter: Path, tmp_path: Path) -> None:
    source = ModelFolder(paddle / "moe_old")
    updates = row_updates(source.meta(), read_adapter(adapter, source.meta()))
    assert len(updates) == 4 * 2 + 2 + 3 * 4
    assert len(updates["layers.1.mlp.experts.gate_up.weight"]) == 8 * 2
    for layout in ("hf", "hf_fused", "paddle"):
        written = ModelFolder(export(paddle / "moe_old", adapter, tmp_path / layout, layout=layout))
        assert written.layout == layout
        theirs = {entry.ours: entry for entry in written.entries() if not entry.copy_of}
        for entry in source.entries():
            if not entry.copy_of:
                want = merged_tensor(source.read(entry), updates.get(entry.ours, []))
                assert torch.equal(written.read(theirs[entry.ours]), want), (layout, entry.ours)


def test_models_are_compared_with_the_experts_the_first_of_them_chose(paddle: Path) -> None:
    """Rounding may tip a choice; a proof that let it would allow far more than rounding."""
    one, other = (ModelFolder(paddle / "moe_new").build().eval() for _ in range(2))
    with torch.no_grad():
        for layer in other.layers[1:]:
            layer.mlp.router.bias += torch.linspace(-0.02, 0.02, 8)  # tips nearly equal choices, weighs nothing
        free = (one(IDS) - other(IDS)).abs().max()
        experts = SameExperts()
        first, second = experts.run(one, IDS), experts.run(other, IDS)
        assert torch.equal(first, one(IDS)[0])
    assert free > 1e-2
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_16_bit_experts_are_merged_and_proven(
    paddle: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ModelFolder(paddle / "moe_old")
    model = source.build()
    state = {n: t if "router" in n else t.to(torch.bfloat16) for n, t in model.state_dict().items()}
    write_model(tmp_path / "base", model.config, state.__getitem__)
    out = export(tmp_path / "base", adapter, tmp_path / "out")
    assert "merged logits within" in capsys.readouterr().out
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.0.gate_proj.weight"].dtype == torch.bfloat16
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.float32


@pytest.mark.parametrize("fault", ["forgotten", "swapped"])
def test_one_wrong_expert_does_not_pass(paddle: Path, adapter: Path, tmp_path: Path, fault: str) -> None:
    source = ModelFolder(paddle / "moe_old")
    good = read_adapter(adapter, source.meta())
    written = ModelFolder(export(paddle / "moe_old", adapter, tmp_path / "out"))
    changed = set(row_updates(source.meta(), good))
    prove(source, good, written, changed, None)
    updates, name = dict(good.updates), "model.layers.2.mlp.experts.{}.up_proj"
    if fault == "forgotten":
        one = updates[name.format(2)]
        updates[name.format(2)] = LowRank(one.A, torch.zeros_like(one.B), one.scale)
    else:
        updates[name.format(2)], updates[name.format(3)] = updates[name.format(3)], updates[name.format(2)]
    with pytest.raises(CheckpointError, match="do not answer as base"):
        prove(source, Adapter(updates, good.rank, good.alpha), written, changed, None)


def test_a_model_without_experts_has_nothing_to_fuse(paddle: Path, tmp_path: Path) -> None:
    out = export(paddle / "dense_old", None, tmp_path / "out", layout="hf_fused")
    assert ModelFolder(out).layout == "hf"
    with safe_open(str(out / "model.safetensors"), "pt") as file:
        assert file.metadata()["format"] == "pt"  # transformers looks for it
