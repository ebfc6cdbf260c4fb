"""Every field of a request has an effect or is refused by its name: OpenAI's, and the common ones of vLLM."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from erniekit.serve.schema import UNSUPPORTED, ChatRequest, CompletionRequest
from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

ASK = [{"role": "user", "content": "hello there"}]
# Of vLLM's SamplingParams and of its two requests, as its OpenAI server documents them.
VLLM = {
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_salt",
    "chat_template", "chat_template_kwargs", "continue_final_message", "detokenize", "documents", "echo",
    "frequency_penalty", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params", "length_penalty",
    "logit_bias", "logits_processors", "logprobs", "max_tokens", "min_p", "min_tokens", "mm_processor_kwargs", "n",
    "presence_penalty", "priority", "prompt_logprobs", "repetition_penalty", "request_id", "response_format",
    "return_token_ids", "return_tokens_as_token_ids", "seed", "skip_special_tokens", "spaces_between_special_tokens",
    "stop", "stop_token_ids", "structured_outputs", "temperature", "top_k", "top_p", "truncate_prompt_tokens",
    "use_beam_search", "vllm_xargs",
}  # fmt: skip
# Fields of OpenAI's interface that do not change an answer: notes of the client, and hints for caches.
NO_EFFECT = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
ONLY_COMPLETIONS, ONLY_CHAT = {"echo"}, {"chat_template_kwargs", "response_format"}
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.fixture(scope="module")
def live(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_folder(paddle, tmp_path_factory.mktemp("fields") / "tiny")
    words = ("max_model_len=256", "max_num_seqs=8", "block_size=8", "max_new_tokens=16", "top_p=1")
    server = Live(folder, *words)
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client()


@pytest.mark.parametrize(
    ("create", "body", "foreign"),
    [(ChatCompletions.create, ChatRequest, ONLY_COMPLETIONS), (Completions.create, CompletionRequest, ONLY_CHAT)],
    ids=["chat", "completions"],
)
def test_every_field_of_openais_client_and_of_vllm_is_in_one_table(create: Any, body: Any, foreign: set[str]) -> None:
    known = set(inspect.signature(create).parameters) - TRANSPORT | VLLM - foreign
    assert "temperature" in known
    tables = (set(body.model_fields), set(UNSUPPORTED), NO_EFFECT)
    assert {name: n for name in sorted(known) if (n := sum(name in table for table in tables)) != 1} == {}


WRONG = {"modalities": ["audio"], "verbosity": "high", "detokenize": False}


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_field_that_is_not_supported_is_a_400_with_its_name(live: Live, name: str) -> None:
    neutral = UNSUPPORTED[name]
    for value in neutral:
        assert live.chat(**{name: value}).status_code == 200, f"{value!r} asks for nothing"
    wrong = WRONG.get(name, not neutral[0] if neutral and isinstance(neutral[0], bool) else ["x"])
    answer = live.chat(**{name: wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        ("completions", "response_format", {"type": "json_object"}),
        ("completions", "tools", []),
        ("chat/completions", "echo", True),
        ("chat/completions", "prompt", "a"),
    ],
)
def test_a_field_of_the_other_route_is_a_400_with_its_name(live: Live, route: str, name: str, value: Any) -> None:
    body = {"messages": ASK} if "chat" in route else {"prompt": "a"}
    answer = live.post(f"/v1/{route}", {**body, name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_a_field_without_effect_is_named_in_the_answers_header(live: Live, name: str) -> None:
    answer = live.chat(**{name: {"a": "b"}})
    assert (answer.status_code, answer.headers["X-Ignored-Fields"]) == (200, name)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_message_without_content_is_a_400_with_its_place(live: Live, role: str) -> None:
    for content in ({}, {"content": None}):
        answer = live.chat(messages=[*ASK, {"role": role, **content}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].content")
        assert f"role {role}" in answer.json()["error"]["message"]
    assert live.chat(messages=[*ASK, {"role": role, "content": ""}, *ASK]).status_code == 200, "empty is not missing"


def test_a_message_that_calls_tools_needs_no_content(live: Live) -> None:
    told = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    assert live.chat(messages=[*ASK, {"role": "assistant", "tool_calls": [CALL]}, told]).status_code == 200


def test_a_text_part_without_text_is_a_400_with_its_place(live: Live) -> None:
    answer = live.chat(messages=[{"role": "user", "content": [{"type": "text"}]}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0].text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_least_length_with_only_end_tokens_allowed_is_a_400(live: Live, stream: bool) -> None:
    ends = sorted(live.loaded.models["tiny"].stop_ids)
    answer = live.chat(min_tokens=2, allowed_token_ids=ends, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")
    assert "min_tokens is 2" in answer.json()["error"]["message"]
    for fields in ({"allowed_token_ids": ends}, {"min_tokens": 2, "allowed_token_ids": [*ends, 300]}):
        assert live.chat(**fields, stream=stream).status_code == 200


def said(client: openai.OpenAI, **fields: Any) -> str:
    """Of one completion; top_k and others are no parameters of OpenAI's client, and go as it lets them."""
    own = {name: fields.pop(name) for name in list(fields) if name in inspect.signature(Completions.create).parameters}
    asked = {"model": "tiny", "prompt": "once upon", "max_tokens": 16, "seed": 5, "temperature": 1.5, **own}
    return client.completions.create(**asked, extra_body=fields).choices[0].text


GREEDY = {"temperature": 0}
# Field -> (what is asked for, what it must equal or differ from).
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_k": ({"top_k": 1}, GREEDY),
    "min_p": ({"min_p": 1}, GREEDY),
    "top_p": ({"top_p": 0}, GREEDY),
    "top_k off": ({"top_k": -1}, {}),
    "seed": ({"seed": 5}, {}),
    "cache_salt": ({"cache_salt": "mine"}, {}),
}
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": (GREEDY, {}),
    "seed": ({"seed": 6}, {}),
    "min_p": ({"min_p": 0.3}, {}),
    "repetition_penalty": ({"repetition_penalty": 5.0, **GREEDY}, GREEDY),
    "frequency_penalty": ({"frequency_penalty": 2.0, "max_tokens": 60, **GREEDY}, {"max_tokens": 60, **GREEDY}),
    "presence_penalty": ({"presence_penalty": 2.0, "max_tokens": 60, **GREEDY}, {"max_tokens": 60, **GREEDY}),
    "logit_bias": ({"logit_bias": {"40": 100}}, {}),
    "max_tokens": ({"max_tokens": 3}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_field_at_its_end_gives_what_another_one_gives(client: openai.OpenAI, name: str) -> None:
    one, other = SAME[name]
    assert said(client, **one) == said(client, **other)


@pytest.mark.parametrize("name", OTHER)
def test_a_field_changes_what_is_said(client: openai.OpenAI, name: str) -> None:
    one, other = OTHER[name]
    assert said(client, **one) != said(client, **other)


def test_only_the_allowed_tokens_are_drawn(client: openai.OpenAI, live: Live) -> None:
    tokenizer = live.loaded.models["tiny"].tokenizer
    allowed = [id for id in range(300, 400) if not tokenizer.is_special(id)][:3]
    told = client.completions.create(
        model="tiny", prompt="a", max_tokens=8, logprobs=1, extra_body={"allowed_token_ids": allowed}
    )
    words = [tokenizer.decode([id], skip_special=False) for id in allowed]
    assert set(told.choices[0].logprobs.tokens) <= set(words)


def test_a_stop_token_ends_the_answer_also_where_the_models_own_end_is_ignored(
    client: openai.OpenAI, live: Live
) -> None:
    tokenizer = live.loaded.models["tiny"].tokenizer
    asked = {"model": "tiny", "prompt": "once upon", "max_tokens": 20, "temperature": 0, "logprobs": 0}
    words = client.completions.create(**asked).choices[0].logprobs.tokens
    by_word = {tokenizer.decode([id], skip_special=False): id for id in range(tokenizer.vocab_size)}
    at = next(k for k in range(1, len(words)) if words[k] not in words[:k] and words[k] in by_word)
    for more in ({}, {"ignore_eos": True}):
        cut = client.completions.create(**asked, extra_body={"stop_token_ids": [by_word[words[at]]], **more}).choices[0]
        assert (cut.logprobs.tokens, cut.finish_reason) == (words[:at], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_is_part_of_the_answer_where_that_is_asked_for(client: openai.OpenAI, stream: bool) -> None:
    text = said(client, temperature=0)
    word = text[len(text) // 2 :][:3]
    asked = {"model": "tiny", "prompt": "once upon", "max_tokens": 16, "temperature": 0, "stop": [word]}
    answer = client.completions.create(**asked, stream=stream, extra_body={"include_stop_str_in_output": True})
    found = "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
    assert found == text[: text.find(word)] + word


def test_prefixes_are_shared_between_requests_of_one_salt_alone_and_counted(client: openai.OpenAI, live: Live) -> None:
    prompt = "word " * 40

    def cached(**fields: Any) -> int:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        return client.completions.create(**asked, extra_body=fields).usage.prompt_tokens_details.cached_tokens

    before = counted(live, "prefix_cache_hits_total")
    assert cached(cache_salt="a") == 0
    hits = cached(cache_salt="a")
    assert hits > 0
    assert hits % 8 == 0, "whole blocks"
    assert cached(cache_salt="b") == cached() == 0
    assert counted(live, "prefix_cache_hits_total") - before == hits
    assert counted(live, "prefix_cache_queries_total") >= 4 * 40


def counted(live: Live, name: str) -> float:
    text = live.http.get(live.url + "/metrics").text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"erniekit_{name} ")))
