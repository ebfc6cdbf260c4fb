"""Generation through the bridge: transformers' own tokens, whole characters only, and every way an answer ends."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from erniekit.api_load import load
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.data.template import prompt_ids
from erniekit.errors import DataError
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject, lora_linears
from erniekit.lora.merge import fold
from erniekit.lora.settings import LoRASettings
from erniekit.models.init import init_weights
from erniekit.serve.generate import Generator, Sampling, _penalise

GREEDY = Sampling(max_new_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def generator(talker) -> Generator:
    return Generator(*load(talker))


def ask(generator: Generator, question: str, sampling: Sampling = GREEDY, on_text=lambda piece: None):
    return generator.answer(prompt_ids([{"role": "user", "content": question}], generator.tokenizer), sampling, on_text)


def test_greedy_tokens_equal_transformers_own_on_the_same_folder(paddle, tmp_path):
    """Random weights never stop by themselves: all 24 tokens are compared."""
    shutil.copytree(paddle / "dense_new", tmp_path, dirs_exist_ok=True)
    shutil.copytree(paddle / "tokenizer", tmp_path, dirs_exist_ok=True)
    ours = Generator(*load(tmp_path))
    prompt = [3, 70, 90, 101, 260]
    answer = ours.answer(prompt, replace(GREEDY, repetition_penalty=1.3))
    theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path)
        .generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=1.3, eos_token_id=[2, 4]
        )[0, len(prompt) :]
        .tolist()
    )
    assert [id for id in theirs if id not in (2, 4)] == answer.ids
    assert len(answer.ids) > 10


def test_an_answer_ends_at_eos(generator):
    answer = ask(generator, "capital of France?")
    assert (answer.text, answer.stopped) == ("Paris.", "stop")


def test_an_answer_ends_at_the_end_of_sentence_token(generator):
    answer = ask(generator, "two plus two?")
    assert (answer.text, answer.stopped) == ("four", "stop")


def test_an_answer_ends_at_a_stop_id_of_the_models_own_files(talker):
    model, tokenizer = load(talker)
    comma = tokenizer.encode_text("Paris.")[-1]
    answer = ask(Generator(model, tokenizer, stop_ids=[comma]), "capital of France?")
    assert answer.stopped == "stop"
    assert answer.text == tokenizer.decode(tokenizer.encode_text("Paris.")[:-1])


def test_pieces_are_whole_characters_and_add_up(generator):
    pieces: list[str] = []
    answer = ask(generator, "greet me", on_text=pieces.append)
    assert "".join(pieces) == answer.text == "你好 😀!"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) >= 4


def test_the_length_limit_cuts_and_says_so(generator):
    answer = ask(generator, "greet me", replace(GREEDY, max_new_tokens=4))
    assert answer.stopped == "length"
    assert len(answer.ids) == 4
    assert answer.text.startswith("你")


def test_the_context_limit_cuts_too_and_refuses_what_does_not_fit(generator):
    prompt = prompt_ids([{"role": "user", "content": "greet me"}], generator.tokenizer)
    answer = generator.answer(prompt, replace(GREEDY, max_model_len=len(prompt) + 2))
    assert len(answer.ids) == 2
    with pytest.raises(DataError, match="tokens long") as caught:
        generator.answer(prompt, replace(GREEDY, max_model_len=len(prompt)))
    assert caught.value.where == "max_model_len"
    with pytest.raises(DataError) as caught:
        generator.answer([5] * 512, replace(GREEDY, max_model_len=4096))
    assert "positions" in caught.value.where


def test_min_tokens_forbids_stopping_early(generator):
    answer = ask(generator, "two plus two?", replace(GREEDY, min_tokens=12))
    assert len(answer.ids) >= 12


def test_sampling_follows_the_seed_and_temperature_zero_does_not(generator):
    hot = Sampling(max_new_tokens=12, temperature=2.0, top_p=1.0, min_tokens=12)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(ask(generator, "who?", hot).ids)
    assert drawn[0] == drawn[1] != drawn[2]
    assert ask(generator, "who?").ids == ask(generator, "who?").ids


def test_a_top_p_of_zero_is_greedy(generator):
    sampling = Sampling(max_new_tokens=8, temperature=1.0, top_p=0.0)
    assert ask(generator, "capital of France?", sampling).text == "Paris."


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(generator):
    def press(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)

    answer = ask(generator, "greet me", on_text=press)
    assert answer.stopped == "interrupt"
    assert answer.text == "你"
    assert ask(generator, "two plus two?").text == "four"


def test_penalties_lower_what_was_said_by_count_and_once():
    scores = _penalise(
        torch.tensor([[2, 2, 0]]), torch.zeros(1, 4), Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    )
    assert scores.tolist() == [[-0.75, 0.0, -1.25, 0.0]]


def test_a_strong_frequency_penalty_stops_repetition(generator):
    free = ask(generator, "who?", replace(GREEDY, min_tokens=24))
    held = ask(generator, "who?", replace(GREEDY, min_tokens=24, frequency_penalty=2.0, presence_penalty=2.0))
    assert len(set(held.ids)) > len(set(free.ids))


def test_padding_rows_of_the_vocabulary_are_never_said(paddle, tmp_path):
    """0.3B has 103,424 embedding rows for 101,310 tokens; here the padding rows are made the likeliest."""
    folder = ModelFolder(paddle / "dense_old")
    config = replace(folder.config, vocab_size=600, tie_word_embeddings=False)
    model = folder.spec.build(config)
    init_weights(model, 0, 0.1)
    with torch.no_grad():
        model.head.weight[512:] *= 50
    write_model(tmp_path, config, model.state_dict().__getitem__, tokenizer_from=paddle / "tokenizer")
    answer = Generator(*load(tmp_path)).answer([3, 70, 90], GREEDY)
    assert max(answer.ids) < 512


def test_an_adapters_answers_are_those_of_the_merged_model(talker, tmp_path):
    model = ModelFolder(talker).build()
    settings = LoRASettings(rank=2, alpha=4)
    inject(model, settings, seed=0)
    with torch.no_grad():
        for _, module in lora_linears(model):
            for pair in module.pairs().values():
                pair.B.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    write_adapter(tmp_path / "adapter", adapter_of(model, settings, base=str(talker)), model)
    write_model(
        tmp_path / "merged", ModelFolder(talker).config, fold(model).state_dict().__getitem__, tokenizer_from=talker
    )
    adapted, merged = (Generator(*load(tmp_path / name)) for name in ("adapter", "merged"))
    said = ask(adapted, "capital of France?").ids
    assert said == ask(merged, "capital of France?").ids
    assert said != ask(Generator(*load(talker)), "capital of France?").ids
