"""The parts of a vision model, each against its definition: positions, frames, pairs of frames, banks, places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from erniekit.data.types import IMAGE, EmbeddingNoise, More, Vision
from erniekit.kernels.frame_attention import frame_attention
from erniekit.kernels.rope import cos_sin, cos_sin_of_axes, frame_cos_sin, inverse_frequencies
from erniekit.lora.frozen_base import store_frozen
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.models.config import BankShape, DecoderConfig, MoEShape, VisionShape
from erniekit.models.init import init_weights
from erniekit.models.layers.attention import Context
from erniekit.models.layers.modal import ModalMoE
from erniekit.models.layers.resampler import frame_pairs
from erniekit.models.layers.vision import Frames
from erniekit.models.layers.vision_language import VisionLanguageDecoder
from erniekit.parallel import compiled
from erniekit.parallel.context import split
from erniekit.parallel.tensor import SlicedInsertion
from parity.test_vl_layouts import row

SHAPE = DecoderConfig(
    family="ernie4_5_vl_moe", rms_norm_eps=1e-5, rope_theta=1e4, rope_style="pairs", max_positions=128,
    tie_word_embeddings=True, vocab_size=61, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, mrope=(1, 1, 2),
    moe=MoEShape(8, 2, 32, 64, start=1, end=1, vision=BankShape(8, 32)),
    vision=VisionShape(depth=2, width=16, heads=2, mlp_width=24, patch=2),
)  # fmt: skip


def model_of(config: DecoderConfig = SHAPE) -> Any:
    model = VisionLanguageDecoder(config)
    init_weights(model, 1, 0.3)
    return model


# --- positions


def test_three_axes_that_agree_are_one_position() -> None:
    positions = torch.arange(7)[None]
    freq = inverse_frequencies(16, 1e4, None, torch.device("cpu"))
    together = cos_sin_of_axes(positions[..., None].expand(1, 7, 3), freq, (3, 3, 2))
    for mine, usual in zip(together, cos_sin(positions, freq)):
        assert torch.equal(mine, usual)


def test_slots_are_turned_by_height_and_width_in_turn_and_the_last_by_time() -> None:
    freq = torch.ones(8)
    cos, _ = cos_sin_of_axes(torch.tensor([[[1, 2, 3]]]), freq, (3, 3, 2))
    assert cos[0, 0, 0].tolist() == torch.tensor([2.0, 3, 2, 3, 2, 3, 1, 1]).cos().tolist()


def test_patches_come_in_blocks_of_two_by_two() -> None:
    cos, _ = frame_cos_sin([(2, 2, 4)], 2, 4, 1e4, torch.device("cpu"))
    one_frame = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    wanted = torch.tensor(one_frame * 2).float().cos()
    torch.testing.assert_close(cos[:, 0], wanted)


# --- tower and resampler


def test_frames_attend_within_themselves_alone() -> None:
    sizes = [4, 4, 6, 4]
    q, k, v = (torch.randn(18, 2, 8) for _ in range(3))
    whole = frame_attention(q, k, v, sizes)
    start = 0
    for size in sizes:
        a, b, c = (t[start : start + size].transpose(0, 1) for t in (q, k, v))
        scores = (a @ b.transpose(1, 2) * 8**-0.5).softmax(-1)
        torch.testing.assert_close(whole[start : start + size], (scores @ c).transpose(0, 1))
        start += size


@pytest.mark.parametrize(("most", "wanted"), [(1, [4, 4, 6, 4]), (8, [8, 6, 4]), (10, [8, 10]), (99, [18])])
def test_chunks_are_whole_frames_and_all_of_them(most: int, wanted: list[int]) -> None:
    frames = Frames.of([4, 4, 6, 4], torch.arange(18), torch.arange(18))
    chunks = frames.chunks(most)
    assert [sum(some.sizes) for _, some in chunks] == wanted
    assert torch.cat([some.cos for _, some in chunks]).tolist() == list(range(18))


def test_pictures_that_are_multiplied_apart_are_cut_alike_whatever_is_around_them() -> None:
    video, picture = [4, 4, 4], [6]
    for sizes, begins in (([*video, *picture], {3}), ([*picture, *video], {1}), ([*picture, *picture, *video], {1, 2})):
        total = sum(sizes)
        chunks = Frames.of(sizes, torch.arange(total), torch.arange(total)).chunks(10, frozenset(begins))
        assert [row for rows, _ in chunks for row in range(rows.start, rows.stop)] == [*range(total)]
        assert all(rows.stop - rows.start <= 10 for rows, _ in chunks)
        products = [size for _, some in chunks for size in some.products]
        assert products == ([8, 4, 6] if sizes[0] == 4 else [6] * (len(sizes) - 3) + [8, 4])
        assert all(sum(some.products) == sum(some.sizes) == int(some.bounds[-1]) for _, some in chunks)


def test_pictures_are_paired_with_themselves_and_frames_with_the_next() -> None:
    first, second = frame_pairs([(1, 2, 4), (4, 2, 2)], 2)
    assert first.tolist() == [0, 1, 2, 4]
    assert second.tolist() == [0, 1, 3, 5]


def test_bytes_are_normalised_as_the_preprocessor_would() -> None:
    tower = model_of().tower
    patches = torch.randint(0, 256, (3, 12), dtype=torch.uint8)
    got = tower.normalised(patches).view(3, 3, 4)
    for channel, (mean, std) in enumerate(zip(tower.shape.mean, tower.shape.std)):
        torch.testing.assert_close(got[:, channel], (patches.view(3, 3, 4)[:, channel] / 255 - mean) / std)


# --- the whole


def test_pixels_move_the_logits_of_their_own_document_from_their_place_on_and_no_other() -> None:
    model, batch = model_of(), row(1, 0, True)
    assert batch.vision is not None
    other = batch.vision._replace(patches=torch.cat((255 - batch.vision.patches[:16], batch.vision.patches[16:])))
    given = (batch.input_ids, batch.positions, batch.documents(), batch.max_doc)
    with torch.no_grad():
        before, after = (model(*given, more=batch.more()._replace(vision=v))[0] for v in (batch.vision, other))
    moved = (before - after).abs().amax(-1) > 1e-6
    end = int(batch.cu_seqlens[1])
    assert moved.tolist() == [3 <= i < end for i in range(32)]


def test_a_batch_without_pictures_gives_every_weight_a_gradient_of_zeros_that_saw_nothing() -> None:
    model, batch = model_of(), row(1, 1, False)
    given = (batch.input_ids, batch.positions, batch.documents(), batch.max_doc)
    model(*given, labels=batch.labels, more=batch.more()).backward()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    seen = {n: bool(p.grad.any()) for n, p in model.named_parameters() if p.requires_grad}
    blind = [n for n, any_ in seen.items() if not any_]
    assert blind == [n for n in seen if n.startswith(("tower.", "resampler.")) or ".vision." in n]


def test_a_frozen_tower_does_not_look_at_a_batch_without_pictures() -> None:
    model, batch = model_of(), row(1, 1, False)
    model.tower.requires_grad_(False)
    model.resampler.requires_grad_(False)
    looked = []
    model.tower.register_forward_hook(lambda *_: looked.append(1))
    model(batch.input_ids, batch.positions, more=batch.more())
    assert not looked
    model.pictures.always_encodes = True
    model(batch.input_ids, batch.positions, more=batch.more())
    assert looked, "where ranks gather its weights together all must"


def test_each_modality_meets_its_own_experts_and_both_the_shared_ones() -> None:
    layer, x = ModalMoE(SHAPE, 1), torch.randn(1, 6, 32)
    init_weights(layer, 2, 0.3)
    assert layer.shared is not None
    modality = torch.tensor([[0, IMAGE, 0, 2, IMAGE, 0]], dtype=torch.uint8)

    ctx = Context(x, x, None, None, modality=modality)
    with torch.no_grad():
        got = layer(x, ctx)
        text, vision = (bank.answer(x, None, None, ctx) for bank in layer.banks())
        wanted = torch.where(modality[..., None] == 0, text, vision) + layer.shared(x)
    torch.testing.assert_close(got, wanted)


def test_a_slice_of_every_row_takes_its_own_features_alone() -> None:
    x, features = torch.zeros(2, 8, 3), torch.arange(1.0, 13).view(4, 3)
    places = torch.tensor([2, 3, 9, 15])
    whole = x.flatten(0, 1).index_copy(0, places, features).view_as(x)
    slices = [SlicedInsertion(r, 2)(x[:, :4], features, places) for r in range(2)]
    assert torch.equal(torch.cat(slices, 1), whole)


def test_a_cut_sequence_keeps_the_pictures_its_tokens_show() -> None:
    batch = row(1, 0, True)
    batch.vision = Vision(
        torch.arange(48)[:, None], torch.tensor([[1, 4, 4], [2, 4, 4]]), torch.tensor([6, 7, 8, 9, 25, 26, 27, 28])
    )
    found = [split(batch, rank, 2, model_of().towers()) for rank in range(2)]
    assert [part.vision.grids.tolist() for part in found] == [[[1, 4, 4], [2, 4, 4]], [[1, 4, 4]]]
    assert found[0].vision.places.tolist() == [6, 7, 16, 16, 9, 10, 11, 12], "chunks of 8: the first and the last"
    assert found[1].vision.places.tolist() == [16, 16, 0, 1]
    assert len(found[1].vision.patches) == 16
    assert [part.modality.shape for part in found] == [(1, 16)] * 2


def test_a_packed_base_leaves_what_sees_and_the_shared_experts_plain() -> None:
    with torch.device("meta"):
        model = VisionLanguageDecoder(SHAPE)
        inject(model, LoRASettings.resolve(rank=3), seed=0)
    store_frozen(model, "wint4/8", "bf16", lambda name: [tuple(model.get_parameter(_base(name)).shape)])
    kinds = {n.removesuffix(".base"): m.kind for n, m in model.named_modules() if hasattr(m, "packed_shape")}
    packed = {n: kind for n, kind in kinds.items() if kind != "plain"}
    assert {kind for n, kind in packed.items() if ".experts." in n} == {"int4"}
    assert {n.split(".")[3] for n in packed if ".experts." in n} == {"text", "vision"}
    assert not [n for n in packed if n.startswith(("tower.", "resampler.")) or ".shared." in n]
    assert packed["layers.0.attn.qkv"] == "int8"


def _base(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}.base.{leaf}"


def test_noise_on_embeddings_is_for_tokens_and_leaves_features_as_they_are() -> None:
    model, batch = model_of(), row(1, 0, True)
    assert batch.vision is not None
    noise = EmbeddingNoise(torch.arange(32, dtype=torch.int32)[None], torch.ones(1, 32))
    noisy, plain = (model.embed_batch(batch.input_ids, batch.more()._replace(noise=n)) for n in (noise, None))
    same = (noisy == plain).all(-1)[0]
    assert same.nonzero().flatten().tolist() == batch.vision.places.tolist()


def test_a_loss_of_a_model_that_knows_no_batch_is_that_of_text() -> None:
    model, ids = model_of(), torch.randint(1, 61, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), model(ids, more=More()))
        flat = F.log_softmax(model(ids), -1)
    assert flat.isfinite().all()


def test_what_a_tower_does_row_by_row_is_compiled_once_for_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, given: list[torch.Tensor]) -> Any:
        built.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    plain, model = model_of().tower, model_of().tower
    model.load_state_dict(plain.state_dict())
    compiled.compile_row_functions(model)
    with torch.no_grad():
        for grids in ([(1, 2, 4)], [(1, 4, 4), (2, 2, 2)], [(1, 6, 4)]):
            count = sum(t * h * w for t, h, w in grids)
            patches = torch.randint(0, 256, (count, 12), dtype=torch.uint8)
            torch.testing.assert_close(model(patches, grids), plain(patches, grids))
    assert len(built) == 2, "positions, and the activation"
