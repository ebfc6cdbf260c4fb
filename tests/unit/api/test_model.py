"""`erniekit.load`: a model that answers texts, conversations and batches, as its own logits say."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import erniekit
from erniekit.api.tokenizer import check_messages
from erniekit.errors import CheckpointError, ConfigError, DataError, DeviceError

GREEDY: dict[str, Any] = dict(temperature=0, max_new_tokens=6)
TALK = [{"role": "user", "content": "What is a lantern?"}]


@pytest.fixture(scope="module")
def model(base: Path) -> erniekit.Model:
    return erniekit.load(base)


def likeliest(model: erniekit.Model, ids: list[int], count: int) -> list[int]:
    said: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            said.append(int(model(torch.tensor([ids + said]))[0, -1, : model.tokenizer.vocab_size].argmax()))
    return said


def test_greedy_text_is_what_the_logits_say_alone_in_a_batch_and_streamed(model: erniekit.Model) -> None:
    prompts: list[Any] = ["The river is", TALK, model.tokenizer.encode("copper")]
    ids = [model.tokenizer.encode(prompts[0]), model.tokenizer.apply_chat_template(TALK, add_generation_prompt=True)]
    ids.append(prompts[2])
    expected = [likeliest(model, one, 6) for one in ids]
    made = model.generate(prompts, details=True, logprobs=True, **GREEDY)
    assert [one.ids for one in made] == expected
    assert [one.finish_reason for one in made] == ["length"] * 3
    assert [one.prompt_tokens for one in made] == [len(one) for one in ids]
    first = torch.log_softmax(model(torch.tensor([ids[0]]))[0, -1].detach(), -1)
    assert made[0].logprobs[0] == pytest.approx(float(first.max()), abs=1e-5)
    assert [model.generate(prompt, **GREEDY) for prompt in prompts] == [one.text for one in made]
    assert (
        "".join(model.generate(TALK, stream=True, **GREEDY)) == made[1].text == model.chat(TALK[0]["content"], **GREEDY)
    )
    texts = ["", "", ""]
    for number, piece in model.generate(prompts, stream=True, **GREEDY):
        texts[number] += piece
    assert texts == [one.text for one in made]


def test_more_prompts_than_places_wait_and_a_longer_answer_makes_room(model: erniekit.Model) -> None:
    prompts = [f"word {k}" for k in range(5)]
    assert model.generate(prompts, batch_size=2, **GREEDY) == [model.generate(one, **GREEDY) for one in prompts]
    long = model.generate("word", details=True, temperature=0, max_new_tokens=10_000, stop="zzz")
    most = model.config.max_positions
    assert long.finish_reason in ("stop", "length")
    assert long.prompt_tokens + len(long.ids) <= most


def test_sampling_is_drawn_by_its_seed_and_stop_strings_end_an_answer(model: erniekit.Model) -> None:
    drawn = [model.generate("river", seed=7, max_new_tokens=8, top_p=1.0) for _ in range(2)]
    assert drawn[0] == drawn[1] != model.generate("river", seed=8, max_new_tokens=8, top_p=1.0)
    two = model.generate(["river", "river"], seed=7, max_new_tokens=8, top_p=1.0)
    assert two[0] == drawn[0] != two[1], "each prompt of a batch has its own seed"
    whole = model.generate("river", **GREEDY)
    cut = model.generate("river", stop=[whole[3:5]], details=True, **GREEDY)
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(whole[3:5])], "stop")


def test_a_stream_with_details_is_refused(model: erniekit.Model) -> None:
    for more in (dict(details=True), dict(logprobs=True)):
        with pytest.raises(erniekit.ErnieKitError, match="pieces of text"):
            model.generate("a", stream=True, **more)


def test_a_stream_that_is_left_stops_the_work_and_closing_ends_its_threads(base: Path) -> None:
    before = threading.active_count()
    model = erniekit.load(base)
    stream = model.generate("river", stream=True, temperature=0, max_new_tokens=500)
    next(stream)
    stream.close()
    assert model.generate("river", **GREEDY), "the engine is free again"
    model.close()
    assert threading.active_count() == before
    assert model.generate("river", **GREEDY)
    del model
    gc.collect()
    assert threading.active_count() == before


def test_a_model_is_also_the_pair_of_its_module_and_tokenizer(model: erniekit.Model) -> None:
    module, tokenizer = model
    assert module is model.module is model[0]
    assert tokenizer is model.tokenizer is model[1]
    encoded = tokenizer(["The river is wide", "copper"], padding=True, return_tensors="pt")
    logits = model(**encoded)
    alone = model(tokenizer("copper", return_tensors="pt")["input_ids"])
    torch.testing.assert_close(logits[1, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(DataError, match="padded on the left"):
        model(**tokenizer(["The river is wide", "copper"], padding=True, padding_side="left", return_tensors="pt"))


@pytest.mark.parametrize(
    ("prompt", "settings", "why"),
    [
        (["a", 3], {}, "a message is not a mapping"),
        ([], {}, "the prompt is an empty list"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "is list, not text"),
        ([{"content": "no role"}], {}, "message 1"),
        ([99_999], {}, "not in the vocabulary"),
        ("river " * 3000, {}, "shorten it"),
        ("a", {"temperature": 9}, "temperature"),
        ("a", {"top_p": "high"}, "top_p"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens"),
        (TALK, {"max_tokens": 3}, "did you mean max_new_tokens?"),
        ([True], {}, "not a mapping"),
    ],
)
def test_what_is_no_prompt_or_setting_is_refused_by_name(model: erniekit.Model, prompt, settings, why: str) -> None:
    with pytest.raises((DataError, ConfigError)) as raised:
        model.generate(prompt, **settings)
    assert why in str(raised.value)


def test_a_folder_without_a_tokenizer_gives_logits_and_says_what_text_needs(base: Path, tmp_path: Path) -> None:
    for file in base.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    model = erniekit.load(tmp_path)
    assert model.tokenizer is None
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 1280)
    with pytest.raises(CheckpointError, match="without a tokenizer"):
        model.generate("a")
    with pytest.raises(ConfigError, match="'quantum' is not known"):
        erniekit.load(base, device="quantum")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "robot", "content": "Hello"}, "the role of a message is 'robot'; expected system, user"),
        ({"role": "user"}, "a message has no content"),
    ],
)
def test_a_message_that_the_template_would_pass_over_is_refused(model: erniekit.Model, message: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        model.chat([message], **GREEDY)
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    check_messages([*TALK, called])


def test_a_device_that_is_not_there_is_named(base: Path) -> None:
    with pytest.raises(DeviceError, match="device 'cuda:99' cannot be used") as caught:
        erniekit.load(base, device="cuda:99")
    assert "device='auto'" in caught.value.fix
