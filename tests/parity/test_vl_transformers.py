"""ERNIE-4.5-VL against transformers' own class: logits, every gradient, and files both ways. float32 throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import VIDEO, Batch, More, Vision
from erniekit.export.run import export
from support.recorded_vision import FOLDER, logits_of, recorded_batch

TOLERANCE = 5e-5  # logits reach 9; fp32 sums in another order
# One more size than the recording's: 3 heads to a kv head, no shared experts, every second layer, untied, patches of 4.
SHAPE: dict[str, Any] = {
    "text_config": {
        "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
        "moe_intermediate_size": [20, 12], "moe_k": 3, "moe_num_experts": 6, "moe_num_shared_experts": 0,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "pad_token_id": 0, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
    },
    "vision_config": {
        "depth": 3, "hidden_size": 24, "num_heads": 3, "intermediate_size": 40, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_merge_size": 2,
    },
    "image_start_token_id": 100, "image_end_token_id": 101, "image_token_id": 102,
    "video_start_token_id": 103, "video_end_token_id": 104, "video_token_id": 105, "tie_word_embeddings": False,
}  # fmt: skip


def of_another_shape() -> Any:
    from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration

    model = Ernie4_5_VLMoeForConditionalGeneration(Ernie4_5_VLMoeConfig(**SHAPE))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            scale = 0.05 if "correction" in name else 0.3 if name.endswith("gate.weight") else 0.15
            param.copy_(1 + 0.1 * noise if "norm" in name or "ln.weight" in name else scale * noise)
    return model


def another_batch() -> Batch:
    """A picture of 4 x 6 patches and a video of 4 frames of 4 x 4."""
    ids = torch.tensor([[5, 6, 100, *[102] * 6, 101, 7, 8, 103, *[105] * 8, 104, 9, 10, 11]])
    grids = torch.tensor([[1, 4, 6], [4, 4, 4]])
    kinds = [0, 0, 1, *[1] * 6, 1, 0, 0, VIDEO, *[VIDEO] * 8, VIDEO, 0, 0, 0]
    patches = torch.randint(0, 256, (24 + 64, 48), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    places = ((ids[0] == 102) | (ids[0] == 105)).nonzero()[:, 0]
    here = [[p, p, p] for p in range(3)]
    here += [[3, 3 + r, 3 + c] for r in range(2) for c in range(3)] + [[p, p, p] for p in range(6, 10)]
    here += [[10 + t, 10 + r, 10 + c] for t in range(2) for r in range(2) for c in range(2)]
    here += [[p, p, p] for p in range(12, 16)]
    labels = ids.roll(-1, 1).masked_fill(torch.tensor([kinds]) != 0, -100)
    positions, bounds = torch.tensor([here]), torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    modality = torch.tensor([kinds], dtype=torch.uint8)
    vision = Vision(patches, grids, places)
    return Batch(ids, labels, positions, bounds, ids.shape[1], 0, packed=False, vision=vision, modality=modality)


def their_logits(theirs: Any, ours: Any, batch: Batch) -> torch.Tensor:
    """Pictures and videos apart, pixels normalised, kinds of tokens told: as their processor would."""
    assert batch.modality is not None
    kinds, ids, vision = batch.modality.int(), batch.input_ids.clone(), batch.vision
    given: dict[str, Any] = {}
    if vision is not None:
        placeholder = torch.zeros_like(kinds).view(-1).index_fill(0, vision.places, 1).view_as(kinds)
        ids = torch.where((kinds == VIDEO) & (placeholder == 1), theirs.config.video_token_id, ids)
        pixels = ours.tower.normalised(vision.patches).split(vision.grids.prod(1).tolist())
        for end, chosen in (("", (vision.grids[:, 0] == 1).tolist()), ("_videos", (vision.grids[:, 0] > 1).tolist())):
            mine = [p for p, one in zip(pixels, chosen) if one]
            if mine:
                grid = "image_grid_thw" if not end else "video_grid_thw"
                given |= {f"pixel_values{end}": torch.cat(mine), grid: vision.grids[torch.tensor(chosen)]}
        given["mm_token_type_ids"] = kinds * placeholder
    positions = batch.positions.permute(2, 0, 1)
    return theirs(
        input_ids=ids, position_ids=positions, moe_mm_token_type_ids=kinds, use_cache=False, **given
    ).logits[0]  # fmt: skip


@pytest.fixture(scope="module", params=["recorded", "another"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Batch]:
    from transformers import Ernie4_5_VLMoeForConditionalGeneration

    if request.param == "recorded":
        theirs = Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(FOLDER / "vl_hf", dtype=torch.float32)
        batch = recorded_batch("image_and_video")
    else:
        theirs, batch = of_another_shape(), another_batch()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return folder, theirs, batch


def test_what_transformers_saves_answers_and_learns_the_same(pair: tuple[Path, Any, Batch]) -> None:
    path, theirs, batch = pair
    folder = ModelFolder(path)
    assert folder.layout == "hf_transformers"
    ours: Any = folder.build()
    more = More(vision=batch.vision, modality=batch.modality)
    logits = ours(batch.input_ids, batch.positions, more=more)[0], their_logits(theirs, ours, batch)
    assert logits[1].abs().max() > 1
    torch.testing.assert_close(*logits, atol=TOLERANCE, rtol=TOLERANCE)
    theirs.zero_grad()
    for each in logits:
        F.cross_entropy(each, batch.labels[0]).backward()
    want = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    params, seen = dict(ours.named_parameters()), set()
    for entry in folder.spec.names(folder.config, "hf_fused"):
        if entry.ours.endswith("correction.bias"):
            assert params[entry.ours].grad is None
            continue
        for name, grad in zip(entry.theirs, entry.write(params[entry.ours].grad)):
            torch.testing.assert_close(grad, want[name], atol=TOLERANCE, rtol=1e-4, msg=lambda m, n=name: n + m)
            seen.add(name)
    assert seen == {name for name in want if "correction" not in name}


@pytest.mark.parametrize("layout", ["hf_transformers", "hf_fused"])
def test_transformers_reads_what_we_write(pair: tuple[Path, Any, Batch], layout: str, tmp_path: Path) -> None:
    from transformers import Ernie4_5_VLMoeForConditionalGeneration

    path, _, batch = pair
    out = export(path, None, tmp_path / "out", layout=layout)
    theirs, info = Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ours = ModelFolder(out).build()
    with torch.no_grad():
        torch.testing.assert_close(
            their_logits(theirs, ours, batch), logits_of(ours, batch), atol=TOLERANCE, rtol=TOLERANCE
        )
