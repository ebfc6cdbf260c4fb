"""From a request to jobs: what the template sees, how long an answer may be, what is refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from erniekit.data.tokenizer import load_tokenizer
from erniekit.serve.message_parsing import MAX_ARGUMENT_CHARACTERS
from erniekit.serve.prompt_work import RENDER_S
from erniekit.serve.prompt_worker import Failed, PromptTask, prepare
from erniekit.serve.request_error import RequestError
from erniekit.serve.request_parsing import (
    ParsedRequest,
    PreparedRequest,
    SamplingDefaults,
    ServedModel,
    parse_chat,
    parse_completion,
)
from erniekit.serve.schema import ChatRequest, CompletionRequest
from support.clock import within

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}{{ style }}"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(paddle: Path) -> ServedModel:
    tokenizer = load_tokenizer(paddle / "tokenizer")
    return ServedModel("tiny", tokenizer, frozenset({tokenizer.eos_id}), 100, tokenizer.vocab_size + 4)


@pytest.fixture
def templated(served: ServedModel) -> ServedModel:
    tokenizer = load_tokenizer(served.tokenizer.folder)
    tokenizer.chat_template = TEMPLATE
    return replace(served, tokenizer=tokenizer)


def prepared(parse, request, served: ServedModel, defaults: SamplingDefaults) -> PreparedRequest:
    """As api.py, with the prompt tokenised in this thread."""
    parsed: ParsedRequest = parse(request, served, defaults)
    made = prepare(PromptTask(parsed.work, parsed.most, RENDER_S), served.tokenizer)
    if isinstance(made, Failed):
        raise parsed.refuse(made)
    return parsed.prepare(made)


def chat(served: ServedModel, defaults: SamplingDefaults = SamplingDefaults(), **fields):  # noqa: B008 - frozen
    request = ChatRequest(messages=[{"role": "user", "content": "hi"}], **fields)
    asked = prepared(parse_chat, request, served, defaults)
    return asked, served.tokenizer.decode(asked.jobs[0].prompt, skip_special=False)


def test_thinking_and_other_variables_reach_the_template(templated: ServedModel):
    assert chat(templated)[1] == "hi"
    asked, text = chat(templated, enable_thinking=True)
    assert (text, asked.reasoning_open) == ("hi<think>", True)
    assert chat(templated, SamplingDefaults(enable_thinking=True))[1] == "hi<think>"
    assert chat(templated, SamplingDefaults(enable_thinking=True), enable_thinking=False)[1] == "hi"
    kwargs = {"enable_thinking": True, "style": "!"}
    assert chat(templated, chat_template_kwargs=kwargs)[1] == "hi<think>!"


def test_a_variable_cannot_smuggle_in_a_control_token(templated: ServedModel):
    asked, _ = chat(templated, chat_template_kwargs={"style": templated.tokenizer.end_token})
    assert templated.tokenizer.end_id not in asked.jobs[0].prompt
    asked, _ = chat(templated, chat_template_kwargs={"messages": [], "add_generation_prompt": False})
    assert asked.jobs[0].prompt == chat(templated)[0].jobs[0].prompt


def test_the_servers_keys_fill_in_what_a_request_leaves_open(served: ServedModel):
    defaults = SamplingDefaults(max_tokens=7, temperature=0.3, top_p=0.4, frequency_penalty=0.1, min_tokens=2)
    wish = chat(served, defaults, top_p=1)[0].jobs[0].sampling
    assert (wish.max_tokens, wish.temperature, wish.top_p) == (7, 0.3, 1)
    assert (wish.frequency_penalty, wish.min_tokens) == (0.1, 2)
    assert chat(served, defaults, max_completion_tokens=9, max_tokens=3)[0].jobs[0].sampling.max_tokens == 9
    assert chat(served, SamplingDefaults(max_tokens=5000))[0].jobs[0].sampling.max_tokens < 100, (
        "no more than there is room"
    )


def test_answers_of_one_seed_have_seeds_of_their_own(served: ServedModel):
    jobs = chat(served, n=3, seed=10)[0].jobs
    assert [job.sampling.seed for job in jobs] == [10, 11, 12]
    assert [job.sampling.seed for job in chat(served, n=2)[0].jobs] == [None, None]


def test_prompts_are_counted_once_however_many_answers_they_get(served: ServedModel):
    one = prepared(parse_completion, CompletionRequest(prompt=["a b c", [5, 6]], n=4), served, SamplingDefaults())
    assert len(one.jobs) == 8
    assert one.prompt_tokens == len(served.tokenizer.encode_text("a b c")) + 2


def test_an_empty_text_still_begins_somewhere(served: ServedModel):
    asked = prepared(parse_completion, CompletionRequest(prompt=""), served, SamplingDefaults())
    assert len(asked.jobs[0].prompt) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [5]}, "allowed_token_ids"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "two words"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": [TOOL], "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {"1e3": 1}}, "logit_bias"),
        ({"logit_bias": {"³": 1}}, "logit_bias"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"max_completion_tokens": 99, "max_tokens": 1}, "max_completion_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served: ServedModel, fields, param):
    with pytest.raises(RequestError) as problem:
        chat(served, **fields)
    assert (problem.value.status, problem.value.param) == (400, param)


def test_a_token_that_the_model_has_no_row_for_is_the_requests_problem(served: ServedModel):
    whole = served.tokenizer
    long = max(range(whole.vocab_size), key=lambda id: len(whole.decode([id])))
    text, rows = whole.decode([long]), long
    assert max(whole.encode_text(text)) == long
    small = replace(served, tokenizer=load_tokenizer(whole.folder, rows), vocab=rows)
    with pytest.raises(RequestError, match=f"the model's embedding {rows} rows") as caught:
        prepared(parse_completion, CompletionRequest(prompt=text), small, SamplingDefaults())
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    with pytest.raises(RequestError, match=f"the model's embedding {rows} rows") as caught:
        prepared(parse_chat, ChatRequest(messages=[{"role": "user", "content": text}]), small, SamplingDefaults())
    assert (caught.value.status, caught.value.param) == (400, "messages")


def with_arguments(*arguments: str) -> ChatRequest:
    calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
    return ChatRequest(messages=[{"role": "assistant", "content": "", "tool_calls": calls}])


def test_arguments_of_tool_calls_are_read_within_bounds_and_stay_text_beyond(served: ServedModel):
    deep = "[" * 900 + "]" * 900
    huge = "[" + "[]," * 2_000_000 + "[]]"
    request = with_arguments('{"a": 1}', "no json", deep, huge, '"' + "x" * MAX_ARGUMENT_CHARACTERS + '"', "2")
    began = time.process_time()
    question = parse_chat(request, served, SamplingDefaults())
    assert within(time.process_time() - began, 0.5)
    calls = question.work.messages[0]["tool_calls"]
    kept = [call["function"]["arguments"] for call in calls]
    assert kept[:3] == [{"a": 1}, "no json", deep]
    assert all(isinstance(text, str) for text in kept[3:5])
    assert kept[5] == 2
    assert json.loads(request.messages[0].tool_calls[0]["function"]["arguments"]) == {"a": 1}, (
        "the request is as it was"
    )


def test_more_log_probabilities_than_an_answer_can_hold_are_refused(served: ServedModel):
    wide = replace(served, longest=100_000)
    few = CompletionRequest(prompt="a", max_tokens=4096, logprobs=20)
    assert prepared(parse_completion, few, wide, SamplingDefaults()).jobs[0].sampling.logprobs == 20
    many = CompletionRequest(prompt=["a"] * 16, n=8, max_tokens=400, logprobs=20)
    with pytest.raises(RequestError) as caught:
        prepared(parse_completion, many, wide, SamplingDefaults())
    assert (caught.value.status, caught.value.param) == (400, "logprobs")
