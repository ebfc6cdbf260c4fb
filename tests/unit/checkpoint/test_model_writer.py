"""Models written here and read elsewhere, and the other way round: bit for bit, in every layout and shard size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM, LlamaConfig, LlamaForCausalLM

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS = {
    "ernie_tied": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY)),
    "ernie_untied": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, tie_word_embeddings=False)),
    "ernie_bias": (Ernie4_5ForCausalLM, Ernie4_5Config(**TINY, use_bias=True)),
    "llama_untied": (LlamaForCausalLM, LlamaConfig(**TINY)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama_bias": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
}
IDS = torch.tensor([[5, 9, 3, 70, 2, 44]])


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory) -> Path:
    """A folder written by transformers' save_pretrained, biases and norms off their trivial values."""
    torch.manual_seed(0)
    model_class, config = MODELS[request.param]
    model = model_class(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = all_tensors(one), all_tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def rewrite(source: Path, target: Path, dtype: torch.dtype | None = None, **options) -> list[Path]:
    folder = ModelFolder(source)
    model = folder.build(dtype)
    return write_model(target, folder.config, model.state_dict().__getitem__, **options)


@pytest.mark.parametrize("shard", [5.0, 1e-5], ids=["whole", "sharded"])
def test_saved_by_transformers_read_and_written_here_is_the_same_bits(saved, tmp_path, shard):
    files = rewrite(saved, tmp_path, max_shard_size=shard)
    assert sorted(files) == sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (shard < 1) == (tmp_path / "model.safetensors.index.json").exists()
    assert_same_bits(saved, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [5.0, 1e-5], ids=["whole", "sharded"])
def test_written_here_loads_in_transformers_with_identical_logits(saved, tmp_path, shard, dtype):
    rewrite(saved, tmp_path, dtype, max_shard_size=shard)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    assert type(ours) is type(theirs)
    assert ours.dtype == dtype  # config.json says it
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hf_to_paddle_to_hf_is_the_same_bits_and_logits(saved, tmp_path, dtype):
    rewrite(saved, tmp_path / "hf", dtype)
    rewrite(tmp_path / "hf", tmp_path / "paddle", layout="paddle")
    assert ModelFolder(tmp_path / "paddle").layout == "paddle"
    rewrite(tmp_path / "paddle", tmp_path / "back")
    assert_same_bits(tmp_path / "hf", tmp_path / "back")
    ids = IDS
    models = [ModelFolder(tmp_path / name).build() for name in ("hf", "paddle", "back")]
    assert torch.equal(models[0](ids), models[1](ids))
    assert torch.equal(models[0](ids), models[2](ids))


@pytest.mark.parametrize("name", ["dense_old", "llama_fused"])
def test_paddle_to_hf_to_paddle_is_the_same_bits(paddle, tmp_path, name):
    rewrite(paddle / name, tmp_path / "hf")
    hf = ModelFolder(tmp_path / "hf")
    assert hf.layout == "hf"
    rewrite(tmp_path / "hf", tmp_path / "paddle", layout="paddle", max_shard_size=1e-4)
    assert_same_bits(paddle / name, tmp_path / "paddle")
    with safe_open(next(tmp_path.glob("paddle/*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "np"}  # the tag ERNIEKit's loader looks for


def test_paddle_to_hf_equals_what_the_newer_paddle_stack_wrote(paddle, tmp_path):
    rewrite(paddle / "dense_old", tmp_path)
    assert_same_bits(paddle / "dense_new", tmp_path)


def test_a_paddle_rewrite_keeps_paddles_own_config_keys(paddle, tmp_path):
    rewrite(paddle / "dense_old", tmp_path, layout="paddle")
    before, after = (json.loads((p / "config.json").read_text()) for p in (paddle / "dense_old", tmp_path))
    assert before.items() <= after.items()


def test_no_tensor_larger_than_the_limit_shares_a_shard(saved, tmp_path):
    limit = 2e-5  # GB: 20 kB
    for file in rewrite(saved, tmp_path, max_shard_size=limit):
        sizes = [t.numel() * t.element_size() for t in load_file(file).values()]
        assert sum(sizes) <= limit * 1e9 or len(sizes) == 1


def test_a_folder_written_again_holds_only_the_new_model(saved, tmp_path):
    rewrite(saved, tmp_path, max_shard_size=1e-5)
    rewrite(saved, tmp_path)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    rewrite(saved, tmp_path, max_shard_size=1e-5)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_bits(saved, tmp_path)


def test_tokenizer_and_generation_files_come_along(paddle, tmp_path):
    folder = ModelFolder(paddle / "dense_old")
    model = folder.build()
    get = model.state_dict().__getitem__
    write_model(tmp_path, folder.config, get, tokenizer_from=paddle / "tokenizer")
    for file in (paddle / "tokenizer").iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_each_tensor_is_asked_for_once_and_in_order(saved, tmp_path):
    """Streaming: the writer never holds more than a shard, so nobody may need a tensor twice."""
    folder = ModelFolder(saved)
    state, asked = folder.build().state_dict(), []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return state[name]

    write_model(tmp_path, folder.config, get)
    assert sorted(asked) == sorted(state)


def test_a_model_in_one_file_is_named_by_an_index_where_a_probe_lies_beside_it(saved, tmp_path):
    """Without one, vLLM and SGLang take the probe's tensors for weights."""
    rewrite(saved, tmp_path)
    before = all_tensors(tmp_path)
    ids = torch.arange(8)[None]
    probes.save(tmp_path, probes.Probe(ids, ids.roll(-1), 1.0, torch.zeros(4, 16), "", "here"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(before, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    built = ModelFolder(tmp_path).build().state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in ModelFolder(saved).build().state_dict().items())


def test_weights_of_64_bits_are_written_as_they_are(paddle: Path, tmp_path: Path) -> None:
    source = ModelFolder(paddle / "dense_old")
    wide = {name: value.double() for name, value in source.build().state_dict().items()}
    write_model(tmp_path, source.config, wide.__getitem__)
    assert ModelFolder(tmp_path).dtype() == torch.float64
