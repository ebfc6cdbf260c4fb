"""The numbers a request may hold: bounded, and bounded alike where the server's own keys give them."""

from __future__ import annotations

from typing import Any

import pytest
from annotated_types import Ge, Le, Lt
from pydantic import ValidationError

from erniekit.config.flat import KEYS
from erniekit.serve.schema import MAX_COMPLETIONS, ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest

ASK = [{"role": "user", "content": "hi"}]


def bounds(name: str) -> tuple[float, float]:
    rules = GenerationRequest.model_fields[name].metadata
    (low,) = [rule.ge for rule in rules if isinstance(rule, Ge)]
    (high,) = [rule.le if isinstance(rule, Le) else rule.lt - 1 for rule in rules if isinstance(rule, (Le, Lt))]
    return low, high


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens"],
)
def test_a_key_of_the_server_has_the_bounds_of_the_field_it_stands_for(name: str):
    low, high = bounds(name)
    assert (KEYS[name].low, KEYS[name].high) == (max(low, 0) if name == "top_k" else low, high)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1e-38), ("repetition_penalty", 0), ("repetition_penalty", 1e-300),
        ("repetition_penalty", 10.1), ("temperature", -1e-300), ("temperature", 2.0000001), ("top_p", 1.0000001),
        ("top_p", -1e-300), ("top_k", 2**31), ("top_k", -2), ("seed", 2**63), ("frequency_penalty", 1e300),
        ("logit_bias", {"5": 1e308}), ("min_tokens", 2**31), ("max_tokens", 0), ("n", 9),
    ],
)  # fmt: skip
def test_a_number_beyond_its_bounds_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValidationError) as error:
        ChatRequest(messages=ASK, **{name: value})
    assert error.value.errors()[0]["loc"][0] == name


def test_a_request_has_so_many_answers_at_most_over_all_its_prompts():
    assert CompletionRequest(prompt=["a"] * 16, n=8).n == 8
    assert CompletionRequest(prompt=list(range(500)), n=8).n == 8, "token ids of one prompt"
    assert CompletionRequest(prompt=[[1, 2]] * 32, n=4).n == 4
    for prompt in (["a"] * 17, [[1]] * 32):
        with pytest.raises(ValidationError) as error:
            CompletionRequest(prompt=prompt, n=8)
        (first,) = error.value.errors()
        assert first["loc"] == ("prompt",)
        assert f"{len(prompt) * 8} answers" in first["msg"]
        assert str(MAX_COMPLETIONS) in first["msg"]


IDS = "a token id is a whole number from 0 on"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["a"] * 257, "257 items are too many for one request; the limit is"),
        ([-1], f"item 0 is -1; {IDS}"),
        ([5, True], f"item 1 is bool; {IDS}"),
        ([5, 2**31], f"item 1 is 2147483648; {IDS}"),
        ([5, "a"], f"item 1 is str; {IDS}"),
        (["a", [5, 6.5]], f"item 1 of item 1 is 6.5; {IDS}"),
    ],
)
def test_a_prompt_that_is_none_is_refused_for_what_is_wrong_with_it(value: Any, message: str):
    for kind, name in ((CompletionRequest, "prompt"), (EmbeddingRequest, "input")):
        with pytest.raises(ValidationError) as error:
            kind(**{name: value})
        (first,) = error.value.errors()
        assert first["loc"] == (name,)
        assert message in first["msg"]


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a"] * 9, "9 strings are too many; the limit is 8"),
        ([5], "a string or a list of strings is needed; stop_token_ids takes token ids"),
        (5, "a string or a list of strings is needed; stop_token_ids takes token ids"),
        (["a", "x" * 65], "a string of 65 characters is too long; the limit is 64"),
    ],
)
def test_stop_strings_are_refused_for_what_is_wrong_with_them(stop: Any, message: str):
    with pytest.raises(ValidationError) as error:
        ChatRequest(messages=ASK, stop=stop)
    (first,) = error.value.errors()
    assert (first["loc"], message in first["msg"]) == (("stop",), True)
    for fine in (None, "", "a", [], [""], ["a"] * 8, "x" * 64):
        assert ChatRequest(messages=ASK, stop=fine).stop == fine
