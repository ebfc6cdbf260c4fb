"""The proof itself: the streamed forward is the model's own, and a merge that went wrong does not pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint.manifest import MANIFEST
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.errors import CheckpointError
from erniekit.export.run import export
from erniekit.export.streamed import streamed
from erniekit.export.verify import prove, same_tensors
from erniekit.lora.adapter import Adapter, LowRank, attach
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.merge import row_updates

IDS = torch.arange(3, 27)[None]


def test_streaming_one_layer_at_a_time_gives_the_whole_models_logits(run: Path, base: Path) -> None:
    folder = ModelFolder(base)
    adapter = read_adapter(run / "checkpoint-10", folder.meta())
    whole = folder.build()
    attach(whole, adapter)
    with torch.no_grad():
        model = streamed(folder, adapter)
        assert torch.equal(model(IDS), whole(IDS))
        assert torch.equal(model(IDS), whole(IDS))  # layers come back for a second pass
    assert all(p.is_meta for p in model.layers.parameters())  # none stays in memory


@pytest.mark.parametrize("fault", ["scale", "rows", "forgotten"])
def test_a_wrong_merge_does_not_pass(run: Path, base: Path, tmp_path: Path, fault: str) -> None:
    source = ModelFolder(base)
    empty = source.meta()
    adapter = read_adapter(run / "checkpoint-10", empty)
    written = ModelFolder(export(base, run / "checkpoint-10", tmp_path / "out"))
    changed = set(row_updates(empty, adapter))
    prove(source, adapter, written, changed, None)
    updates = dict(adapter.updates)
    one = updates["model.layers.1.mlp.up_proj"]
    if fault == "scale":
        updates = {n: LowRank(u.A, u.B, u.scale * 1.01) for n, u in updates.items()}
    elif fault == "rows":
        updates["model.layers.1.mlp.up_proj"] = LowRank(one.A, one.B.roll(1, 0), one.scale)
    else:
        updates["model.layers.1.mlp.up_proj"] = LowRank(one.A, torch.zeros_like(one.B), one.scale)
    with pytest.raises(CheckpointError, match="do not answer as base"):
        prove(source, Adapter(updates, adapter.rank, adapter.alpha), written, changed, None)


def test_one_flipped_bit_in_an_untouched_tensor_is_found(run: Path, base: Path, tmp_path: Path) -> None:
    out = export(base, None, tmp_path / "out")
    file = out / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, str(file), metadata={"format": "pt"})
    (out / MANIFEST).unlink()  # without digests
    with pytest.raises(CheckpointError, match=r"norm\.weight changed"):
        same_tensors(ModelFolder(base), ModelFolder(out), set())
