"""Our decoders against transformers' classes: logits and every gradient, plain rows and packed rows, in float32."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM, LlamaConfig, LlamaForCausalLM

from erniekit.checkpoint.model_folder import ModelFolder

# fp32 sums in another order: these logits reach about 5, one ulp there is 5e-7, and a few dozen of them add up.
TOLERANCE = 1e-5

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # short, so that all three bands of the blend occur in 16 channels
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

CASES = {
    "ernie_tied": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, head_dim=16)),
    "ernie_wide_heads": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, head_dim=32)),
    "ernie_untied": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, head_dim=32, tie_word_embeddings=False)),
    "ernie_bias": (
        Ernie4_5ForCausalLM,
        Ernie4_5Config(**TINY, head_dim=32, use_bias=True, tie_word_embeddings=False),
    ),
    "ernie_bias_tied": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, head_dim=32, use_bias=True)),
    "llama_gqa": (LlamaForCausalLM, LlamaConfig(**TINY)),
    "llama_mha": (LlamaForCausalLM, LlamaConfig(**{**TINY, "num_key_value_heads": 4})),
    "llama_wide_heads": (LlamaForCausalLM, LlamaConfig(**TINY, head_dim=24)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama_bias": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama_rope_llama3": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=LLAMA3)),
    "llama_rope_linear": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=LINEAR)),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """(folder, transformers model, our model read from its save_pretrained). No weight is left at a trivial value."""
    model_class, config = CASES[request.param]
    config._attn_implementation = "eager"
    theirs = model_class(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(1 + 0.1 * noise if "norm" in name else 0.12 * noise)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    folder = ModelFolder(path)
    return folder, theirs, folder.build(torch.float32)


def tokens(batch: int, length: int) -> torch.Tensor:
    # Id 0 stays out: transformers' padding_idx stops its lookup gradient, ours trains it as ERNIEKit does.
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def block_mask(cu_seqlens: list[int], batch: int, length: int) -> torch.Tensor:
    """The additive [B, 1, L, L] mask transformers' eager path takes: causal inside each document."""
    token = torch.arange(batch * length).view(batch, length)
    doc = torch.bucketize(token, torch.tensor(cu_seqlens), right=True)
    allowed = (token[:, :, None] >= token[:, None, :]) & (doc[:, :, None] == doc[:, None, :])
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def restarting(cu_seqlens: list[int], batch: int, length: int) -> torch.Tensor:
    ends = torch.tensor(cu_seqlens)
    return torch.cat([torch.arange(int(n)) for n in ends.diff()]).view(batch, length)


def compare(folder: ModelFolder, theirs, ours, ids: torch.Tensor, their_inputs: dict, our_inputs: dict) -> None:
    labels = ids.roll(-1, 1).masked_fill(torch.arange(ids.shape[1]) < 3, -100)
    theirs.zero_grad(), ours.zero_grad()
    their_logits = theirs(ids, use_cache=False, **their_inputs).logits
    our_logits = ours(ids, **our_inputs)
    assert our_logits.shape == their_logits.shape
    assert their_logits.abs().max() > 1  # a model whose logits vanish would prove nothing
    torch.testing.assert_close(our_logits, their_logits, atol=TOLERANCE, rtol=TOLERANCE)
    for logits in (their_logits, our_logits):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    our_params = dict(ours.named_parameters())
    seen = set()
    for entry in folder.entries():
        for name, grad in zip(entry.theirs, entry.write(our_params[entry.ours].grad)):
            expected = their_grads[name]
            assert expected.abs().max() > 0, name
            torch.testing.assert_close(
                grad, expected, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
            seen.add(name)
    assert seen == their_grads.keys()


def test_logits_and_all_gradients_equal_on_plain_rows(pair):
    folder, theirs, ours = pair
    compare(folder, theirs, ours, tokens(2, 11), {}, {})


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logits_and_all_gradients_equal_on_packs_with_restarting_positions(pair, backend):
    folder, theirs, ours = pair
    bounds = [0, 9, 10, 24, 30, 48]  # two rows of 24; one document of a single token; every row starts a document
    positions = restarting(bounds, 2, 24)
    for layer in ours.layers:
        layer.attn.inner.backend = backend
    compare(
        folder,
        theirs,
        ours,
        tokens(2, 24),
        {"attention_mask": block_mask(bounds, 2, 24), "position_ids": positions},
        {"positions": positions, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "max_doc": 18},
    )


def test_a_document_in_a_pack_gets_the_logits_it_has_alone(pair):
    _, theirs, ours = pair
    ids, bounds = tokens(1, 24), [0, 9, 10, 24]
    packed = ours(ids, restarting(bounds, 1, 24), torch.tensor(bounds, dtype=torch.int32), 14)
    for start, end in itertools.pairwise(bounds):
        alone = theirs(ids[:, start:end], use_cache=False).logits
        torch.testing.assert_close(packed[:, start:end], alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_bf16_logits_stay_within_bf16_rounding_of_transformers(pair):
    folder, theirs, _ = pair
    ids = tokens(2, 11)
    exact = theirs(ids, use_cache=False).logits
    their_bf16 = copy.deepcopy(theirs).to(torch.bfloat16)(ids, use_cache=False).logits.float()
    our_bf16 = folder.build(torch.bfloat16)(ids).float()
    # Same cast points, other summation order: we are as near to fp32 as transformers' own bf16 is, up to a factor 1.5.
    assert (our_bf16 - exact).norm() <= 1.5 * (their_bf16 - exact).norm()
