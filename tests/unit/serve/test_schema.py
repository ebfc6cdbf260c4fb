"""The numbers a request may hold: bounded, and bounded alike where the server's own keys give them."""

from __future__ import annotations

from typing import Any

import pytest
from annotated_types import Ge, Le, Lt
from pydantic import ValidationError

from erniekit.config.flat import KEYS
from erniekit.serve.schema import MAX_COMPLETIONS, ChatRequest, CompletionRequest, GenerationRequest

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
