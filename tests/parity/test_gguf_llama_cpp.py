"""GGUF files in llama.cpp itself: the same greedy tokens, the same ids, and what 8 bits cost."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.data.template import prompt_ids, prompt_text
from erniekit.data.tokenizer import load_tokenizer
from erniekit.demo.tiny import FAMILIES, PERSONA, TRAIN, demo_text, make_tiny_model
from erniekit.export.run import export
from erniekit.models.init import init_weights
from support.llama_cpp import ask
from support.small_tokenizers import make

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("llama_cpp")]

NEW = 12  # tokens of each answer
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
ODD = ["\n", "\n\n  \n", "  two  blanks ", "\ttab", "1234567890", "3.14e-10", "汉字与ABC混排，标点。", "héllo – naïve",
       "🚀👩‍👩‍👧", "I'LL we've 'S", "def f(x):\n    return x**2", "ﬁ ＡＢ", "\u200b\u3000", "Ω≈ç√∫",
       "русский язык"]  # fmt: skip


def rows() -> list[dict]:
    return [json.loads(line) for path in (TRAIN, PERSONA) for line in path.read_text("utf-8").splitlines()]


def prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    asked = [[{"role": "user", "content": row["src"][0]}] for row in rows()]
    return [prompt_ids(messages, tokenizer)[:200] for messages in asked[:count]]


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Of one to four turns, with and without system text, out of the demo's rows and text of every odd kind."""
    chance, given = random.Random(0), rows()

    def text() -> str:
        row = chance.choice(given)
        parts = [chance.choice([*row["src"], *row["tgt"]]), *chance.sample(ODD, chance.randrange(3))]
        chance.shuffle(parts)
        return chance.choice(["", " "]).join(parts)

    out = []
    for _ in range(count):
        roles = ["system"] * chance.randrange(2) + ["user", "assistant"] * chance.randrange(4) + ["user"]
        out.append([{"role": role, "content": text()} for role in roles])
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("llama_cpp")
    out = {family: make_tiny_model(root / family, family=family) for family in FAMILIES}
    changes = {"llama": {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True, "num_kv_heads": 4},
               "ernie4_5": {"rope_scaling": LINEAR, "tie_word_embeddings": False}}  # fmt: skip
    for family, change in changes.items():
        folder = ModelFolder(out[family])
        config = replace(folder.config, raw={}, **change)
        model = folder.spec.build(config)
        init_weights(model, 1, config.init_std)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name.endswith("bias"):
                    param.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
        out[f"{family}, scaled"] = root / f"{family}-scaled"
        write_model(out[f"{family}, scaled"], config, model.state_dict().__getitem__, tokenizer_from=out[family])
    return out


def with_router_bias(folder: Path, out: Path) -> Path:
    """What training without a balance loss leaves: a bias that changes which experts are chosen."""
    model = ModelFolder(folder).build()
    with torch.no_grad():
        model.layers[1].mlp.router.bias.copy_(torch.linspace(-0.3, 0.3, 8))
    write_model(out, model.config, model.state_dict().__getitem__, tokenizer_from=folder)
    return out


@torch.no_grad()
def answers(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]))[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_gives_llama_cpps_greedy_tokens_on_100_prompts(tiny, tmp_path, family):
    asked = prompts(tiny["ernie4_5"], 100)
    assert len(asked) == 100
    file = export(tiny[family], None, tmp_path / "out", gguf="f32") / "model-F32.gguf"
    got = ask(file, greedy=asked, count=NEW)["greedy"]
    model = ModelFolder(tiny[family]).build().eval()
    for ids, theirs in zip(asked, got):  # ours at each place, with theirs before it: equal everywhere or nowhere
        assert answers(model, ids + theirs)[len(ids) - 1 : -1].argmax(-1).tolist() == theirs
    assert len({tuple(answer) for answer in got}) > 10, "the prompts matter"


@pytest.mark.parametrize("name", ["llama, scaled", "ernie4_5, scaled", "router bias"])
def test_fp32_gives_llama_cpps_logits_with_scaled_positions_biases_and_moved_routers(tiny, tmp_path, name):
    source = tiny.get(name) or with_router_bias(tiny["ernie4_5_moe"], tmp_path / "biased")
    asked = prompts(tiny["ernie4_5"], 20)
    file = export(source, None, tmp_path / "out", gguf="f32") / "model-F32.gguf"
    model = ModelFolder(source).build().eval()
    for ids, theirs in zip(asked, ask(file, logits=asked)["logits"]):
        # fp32 sums in another order, on logits near 5
        torch.testing.assert_close(torch.from_numpy(theirs), answers(model, ids), atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_cost_at_most_a_thousandth_of_a_nat(tiny, tmp_path, family):
    asked = prompts(tiny["ernie4_5"], 40)
    file = export(tiny[family], None, tmp_path / "out", gguf="q8_0") / "model-Q8_0.gguf"
    model = ModelFolder(tiny[family]).build().eval()
    far = []
    for ids, theirs in zip(asked, ask(file, logits=asked)["logits"]):
        want = answers(model, ids).log_softmax(-1)
        got = torch.from_numpy(theirs).log_softmax(-1)
        far += (want.exp() * (want - got)).sum(-1).tolist()
    assert 1e-6 < sum(far) / len(far) <= 1e-3


@pytest.mark.parametrize("word", ["f16", "bf16", "q4_0", "mxfp4"])
def test_every_other_type_is_computed_as_we_read_it_back(tiny, opened_model, tmp_path, word):
    """llama.cpp rounds activations to 8 bits beside 4-bit weights: the answers are near each other, not equal."""
    ids = prompts(tiny["ernie4_5"], 1)[0]
    out = export(tiny["ernie4_5_moe"], None, tmp_path / "out", gguf=word)
    (file,) = out.glob("*.gguf")
    got = torch.from_numpy(ask(file, logits=[ids])["logits"][0])
    want = opened_model(tiny["ernie4_5_moe"], file, torch.tensor([ids]))
    assert (got - want).abs().mean() < 0.05 * want.std()


@pytest.fixture
def opened_model():
    """Logits of our model with the weights that the gguf package reads from a file."""
    import gguf

    from erniekit.export.gguf.names import gguf_names, stored_config

    def run(folder: Path, file: Path, ids: torch.Tensor) -> torch.Tensor:
        tensors = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
                   for t in gguf.GGUFReader(file).tensors}  # fmt: skip
        source = ModelFolder(folder)
        model = source.build()
        state = model.state_dict()
        with torch.no_grad():
            for entry in gguf_names(stored_config(source.config)):
                state[entry.ours].copy_(entry.read([tensors[name] for name in entry.theirs]))
            logits: torch.Tensor = model.eval()(ids)[0]
        return logits

    return run


def test_500_conversations_have_the_ids_they_have_here(tiny, tmp_path):
    file = export(tiny["ernie4_5"], None, tmp_path / "out", gguf="q8_0") / "model-Q8_0.gguf"
    tokenizer, given = load_tokenizer(tiny["ernie4_5"]), conversations(500)
    got = ask(file, chats=given, ends=True)
    assert got["texts"] == [prompt_text(messages, tokenizer) for messages in given]
    assert got["chats"] == [prompt_ids(messages, tokenizer, whole=True) for messages in given]
    assert set(got["ends"]) == {tokenizer.eos_id, tokenizer.end_id}


def llama3_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from unit.export.gguf.test_vocabulary import LLAMA3 as PATTERN

    engine = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<s>", "</s>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    engine.train_from_iterator(demo_text(), trainer)
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.mark.parametrize("kind", ["llama 3", "byte level", "byte fallback, always", "byte fallback, first"])
def test_other_tokenizers_give_the_same_ids_behind_bos(tiny, paddle, tmp_path, kind):
    folder = tmp_path / "tokenizer"
    llama3_tokenizer(folder) if kind == "llama 3" else make(kind, paddle, folder)
    tokenizer = load_tokenizer(folder)
    source = ModelFolder(tiny["llama"])
    config = replace(source.config, vocab_size=tokenizer.vocab_size)
    model = source.spec.build(config)
    init_weights(model, 0, config.init_std)
    write_model(tmp_path / "model", config, model.state_dict().__getitem__, tokenizer_from=folder)
    file = export(tmp_path / "model", None, tmp_path / "out", gguf="f32") / "model-F32.gguf"
    texts = [messages[-1]["content"] for messages in conversations(200)]
    if kind.endswith("always"):  # the one difference that export warns of
        texts = [text.lstrip(" ") for text in texts]
    got = ask(file, tokens=["<s>" + text for text in texts])["tokens"]
    assert got == [tokenizer.encode_rendered([("<s>", True), (text, False)]) for text in texts]
