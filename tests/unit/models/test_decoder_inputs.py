"""Embeddings as an input of a model, and the slot that makes them of ids."""

from __future__ import annotations

import torch
from torch import nn

from erniekit.models.config import MoEShape
from erniekit.models.init import init_weights
from erniekit.models.layers.decoder import Decoder
from support.tiny_config import with_experts


def model() -> Decoder:
    decoder = Decoder(with_experts(MoEShape(experts=4, choices=2, width=16, shared_width=16, start=1, end=2)))
    init_weights(decoder, seed=0, std=0.2)
    return decoder.eval()


def test_embeddings_take_the_place_of_ids_and_get_gradients() -> None:
    decoder, ids = model(), torch.tensor([[5, 9, 2, 7]])
    given = decoder.embed_ids(ids).detach().requires_grad_()
    answer = decoder(ids, embedded=given)
    torch.testing.assert_close(answer, decoder(ids))
    answer.sum().backward()
    assert given.grad is not None
    assert given.grad.abs().sum() > 0
    changed = given.detach().clone()
    changed[:, 1] += 1.0
    assert not torch.allclose(decoder(ids, embedded=changed), answer)


def test_what_is_in_the_slot_makes_the_embeddings() -> None:
    class Doubled(nn.Module):
        def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return 2 * nn.functional.embedding(ids, weight)

    decoder, ids = model(), torch.tensor([[5, 9, 2, 7]])
    want = decoder(ids, embedded=2 * decoder.embed_ids(ids))
    decoder.embedding = Doubled()
    torch.testing.assert_close(decoder(ids), want)


def test_a_model_names_its_layers_and_blocks() -> None:
    decoder = model()
    numbers = [number for number, _ in decoder.held_layers()]
    assert numbers == list(range(len(decoder.layers)))
    assert list(decoder.blocks()) == list(decoder.layers), "no layers that predict further tokens"
