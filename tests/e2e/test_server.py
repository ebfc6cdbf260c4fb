"""The server as its clients see it: OpenAI's own client on every route, many at once, adapters by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

ASK = [{"role": "user", "content": "hello there"}]
EXAMPLES = 4
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def live(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_folder(paddle, tmp_path_factory.mktemp("served") / "tiny")
    server = Live(folder, "max_model_len=256", "max_num_seqs=16", "block_size=8", "max_new_tokens=12", "temperature=0")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client()


def test_the_models_are_listed_and_found_by_name(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "erniekit")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_a_chat_answers_whole_and_as_a_stream_with_the_same_text_and_usage(client):
    whole = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=9)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 9
    parts = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == whole.choices[0].message.content
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "length"
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices == []
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0, "the second time the prompt was there"
    apart = {"prompt_tokens_details": None}
    assert parts[-1].usage.model_copy(update=apart) == whole.usage.model_copy(update=apart)


def test_a_completion_answers_text_and_token_ids_alike_one_or_several(client, live):
    tokenizer = next(iter(live.loaded.models.values())).tokenizer
    ids = tokenizer.encode_text("once upon")
    one = client.completions.create(model="tiny", prompt="once upon", max_tokens=6)
    both = client.completions.create(model="tiny", prompt=["once upon", ids], max_tokens=6)
    assert [c.text for c in both.choices] == [one.choices[0].text] * 2
    assert both.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    echoed = client.completions.create(model="tiny", prompt="once upon", max_tokens=6, echo=True)
    assert echoed.choices[0].text == "once upon" + one.choices[0].text
    stream = client.completions.create(model="tiny", prompt="once upon", max_tokens=6, stream=True)
    assert "".join(p.choices[0].text for p in stream) == one.choices[0].text


def test_a_stop_word_ends_the_answer_before_it_is_shown(client):
    text = client.completions.create(model="tiny", prompt="once", max_tokens=30, temperature=0).choices[0].text
    word = text[len(text) // 2 :][:3]
    cut = text[: text.find(word)]
    for stream in (False, True):
        answer = client.completions.create(model="tiny", prompt="once", max_tokens=30, stop=[word], stream=stream)
        said = "".join(p.choices[0].text for p in answer) if stream else answer.choices[0].text
        assert said == cut
    assert (
        client.completions.create(model="tiny", prompt="once", max_tokens=30, stop=word).choices[0].finish_reason
        == "stop"
    )


def test_a_seed_gives_the_same_words_again_and_n_gives_different_ones(client):
    def ask(seed):
        answer = client.chat.completions.create(model="tiny", messages=ASK, temperature=1.5, top_p=1, seed=seed, n=4)
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
        return [c.message.content for c in answer.choices]

    assert ask(7) == ask(7)
    assert len(set(ask(7))) > 1
    assert ask(7) != ask(8)


def test_several_streamed_answers_arrive_mixed_and_each_whole(client):
    plain = client.chat.completions.create(model="tiny", messages=ASK, n=3, seed=3, temperature=1)
    said: dict[int, str] = {}
    for part in client.chat.completions.create(model="tiny", messages=ASK, n=3, seed=3, temperature=1, stream=True):
        for choice in part.choices:
            said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
    assert said == {c.index: c.message.content for c in plain.choices}


def test_logprobs_are_those_of_the_chosen_tokens_and_of_the_likeliest(client):
    answer = client.chat.completions.create(model="tiny", messages=ASK, logprobs=True, top_logprobs=3, max_tokens=4)
    told = answer.choices[0].logprobs.content
    assert len(told) == 4
    assert all(t.logprob == t.top_logprobs[0].logprob and len(t.top_logprobs) == 3 for t in told), "greedy is the top"
    done = client.completions.create(model="tiny", prompt="a", logprobs=2, max_tokens=4).choices[0].logprobs
    assert len(done.tokens) == len(done.token_logprobs) == len(done.top_logprobs) == 4
    assert done.text_offset[0] == 0


def test_penalties_bias_and_the_shortest_length_change_what_is_said(client):
    plain = client.completions.create(model="tiny", prompt="a b c", max_tokens=20, temperature=0)
    told = client.completions.create(model="tiny", prompt="a b c", max_tokens=1, logprobs=2, temperature=0)
    assert told.choices[0].text
    punished = client.completions.create(
        model="tiny", prompt="a b c", max_tokens=20, frequency_penalty=2, presence_penalty=2,
        extra_body={"repetition_penalty": 1.8, "min_tokens": 5},
    )  # fmt: skip
    assert punished.choices[0].text != plain.choices[0].text
    biased = client.completions.create(model="tiny", prompt="a b c", max_tokens=5, logit_bias={"100": 100}, logprobs=0)
    assert len(set(biased.choices[0].logprobs.tokens)) == 1


def test_tools_are_put_before_the_model_and_a_history_of_calls_is_taken(client):
    bare = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
    with_tools = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, max_tokens=2)
    assert with_tools.usage.prompt_tokens > bare.usage.prompt_tokens
    none = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=2)
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": "rain"}]  # fmt: skip
    client.chat.completions.create(model="tiny", messages=history, max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASK, tool_choice="required")


def test_content_may_come_in_parts_of_text_but_not_as_an_image(client):
    whole = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]}]
    again = client.chat.completions.create(model="tiny", messages=parts, max_tokens=4)
    assert again.choices[0].message.content == whole.choices[0].message.content
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=image)


def test_health_and_metrics_tell_what_happened(live, client):
    client.chat.completions.create(model="tiny", messages=ASK)
    assert httpx.get(live.url + "/health").json()["status"] == "ok"
    text = httpx.get(live.url + "/metrics").text
    assert int(re.search(r"^erniekit_generated_tokens_total (\d+)$", text, re.MULTILINE)[1]) > 0
    assert 'erniekit_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert "erniekit_first_token_seconds_count" in text


def test_thirty_two_clients_at_once_get_what_each_would_get_alone(live):
    prompts = [f"question number {k} about {'a b c d e f g h'[: k % 15]}" for k in range(32)]

    def ask(prompt: str) -> str:
        return live.chat(prompt, max_tokens=10).json()["choices"][0]["message"]["content"]

    alone = [ask(prompt) for prompt in prompts]
    before = live.engine.load().steps
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
    assert live.engine.load().steps - before < 32 * 11 / 2, "they were not batched"


def test_the_first_token_of_a_stream_does_not_wait_for_the_answers_of_others(live):
    """A long answer runs; a second stream begins and ends while it does."""
    client = live.client()
    long = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(long))
    short = client.completions.create(
        model="tiny", prompt="y", max_tokens=2, stream=True, extra_body={"ignore_eos": True}
    )
    assert list(short)[-1].choices[0].finish_reason == "length"
    assert live.engine.load().running == 1, "the long one is still at it"
    long.close()
    assert live.idle()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/chat/completions", b"{", {}, 400),
        ("/v1/chat/completions", b'{"messages": NaN}', {}, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\xff"}]}', {}, 400),
        ("/v1/chat/completions", b"[" * 100 + b"]" * 100, {}, 400),
        ("/v1/chat/completions", b"[" * 100000, {}, 400),
        ("/v1/chat/completions", b"{}", {"content-type": "text/plain"}, 415),
        ("/v1/chat/completions", b"{}", {}, 422),
        ("/v1/chat/completions", b'{"messages": "hello"}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "robot", "content": ""}]}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {}, 400),
        ("/v1/chat/completions", b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}', {}, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "n": 9}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "temperature": 2.1}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 21}', {}, 422),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000}', {}, 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "model": "gpt"}', {}, 404),
        ("/v1/completions", b'{"prompt": [999999]}', {}, 400),
        ("/v1/completions", b'{"prompt": []}', {}, 422),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {"-1": 5}}', {}, 400),
        ("/v1/completions", b'{"prompt": "a", "stop": ["1","2","3","4","5","6","7","8","9"]}', {}, 422),
        ("/v1/nothing", b"{}", {}, 404),
        ("/health", b"{}", {}, 405),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_the_shape_clients_know(live, path, body, headers, status):
    answer = httpx.post(live.url + path, content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text


def test_an_answer_that_is_too_long_is_refused_with_the_longest_that_fits_and_that_one_is_answered(live):
    longest = live.http.get(live.url + "/v1/models").json()["data"][0]["max_model_len"]
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body, name in (
        ("/v1/completions", {"prompt": [5, 6, 7]}, "max_tokens"),
        ("/v1/chat/completions", chat, "max_tokens"),
        ("/v1/chat/completions", chat, "max_completion_tokens"),
    ):
        prompt = live.post(path, {**body, name: 1}).json()["usage"]["prompt_tokens"]
        for asked in (longest - prompt + 1, longest, 100 * longest):
            answer = live.post(path, {**body, name: asked})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "context_length_exceeded")
            assert error["message"] == (
                f"this model's context is {longest} tokens and the prompt has {prompt} of them: "
                f"{name} is {asked}, and can be {longest - prompt} at most"
            )
        assert live.post(path, {**body, name: longest - prompt}).status_code == 200


def test_a_prompt_that_is_too_long_is_refused_with_its_length_and_what_fits(live):
    longest = live.http.get(live.url + "/v1/models").json()["data"][0]["max_model_len"]
    error = live.post("/v1/completions", {"prompt": [5] * longest, "max_tokens": 1}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert error["message"] == (
        f"this model's context is {longest} tokens and the prompt has {longest}: send {longest - 1} at most"
    )


def test_fields_nobody_knows_are_ignored_and_named_in_the_answer_and_once_in_the_log(live, capfd):
    for stream in (False, True):
        answer = live.chat(wishes={"deep": [1]}, user="me", store=True, stream=stream, **{"x\r\nSet-Cookie: a": 1})
        assert answer.status_code == 200
        assert answer.headers["X-Ignored-Fields"] == "store, user, wishes"
        assert "Set-Cookie" not in answer.headers
    assert capfd.readouterr().err.count("store, user, wishes") == 1
    assert "X-Ignored-Fields" not in live.chat().headers


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("length_penalty", 0.1, 1.0),
        ("guided_json", {"type": "object"}, None),
        ("functions", [{"name": "f"}], []),
        ("bad_words", ["x"], []),
        ("best_of", 4, 1),
        ("continue_final_message", True, False),
    ],
)
def test_a_field_that_would_change_the_answer_and_cannot_is_refused_by_name(live, name, value, neutral):
    refused = live.chat(**{name: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert live.post("/v1/completions", {"prompt": "a", name: value}).status_code == 400
    assert live.chat(**{name: neutral}).status_code == 200


def test_top_k_of_a_request_and_of_the_server_is_obeyed(live, paddle, tmp_path):
    greedy = live.chat().json()["choices"][0]["message"]["content"]
    hot = {"temperature": 2, "top_p": 1, "n": 4, "seed": 3}

    def said(server: Live, **more: object) -> set[str]:
        return {choice["message"]["content"] for choice in server.chat(**hot, **more).json()["choices"]}

    assert len(said(live)) > 1
    assert said(live, top_k=0) == said(live, top_k=-1) == said(live)
    assert said(live, top_k=1) == {greedy}
    assert live.chat(top_k=-2).status_code == 422
    other = Live(tiny_folder(paddle, tmp_path / "tiny"), "max_model_len=256", "top_k=1")
    try:
        assert said(other) == {greedy}
        assert len(said(other, top_k=0)) > 1
    finally:
        other.close()


def test_a_body_over_eight_megabytes_is_refused_before_it_is_read(live):
    big = httpx.post(
        live.url + "/v1/completions", content=b" " * (8 * 2**20 + 1), headers={"content-type": "application/json"}
    )
    assert big.status_code == 413
    assert live.chat().status_code == 200


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(16 * EXAMPLES, marks=pytest.mark.full)])
def test_the_servers_own_schema_fuzzed_gives_no_server_error(live, examples):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(live.url + "/openapi.json")
    called: list[str] = []

    def fuzz(case):
        if isinstance(case.body, dict):
            case.body.pop("max_tokens", None)  # up to the whole context is right, and slow
            case.body.pop("max_completion_tokens", None)
        called.append(case.operation.path)
        case.call_and_validate(base_url=live.url, checks=[not_a_server_error], timeout=60)

    quick = settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for result in schema.get_all_operations():
        operation = result.ok()
        quick(given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))(fuzz))()
        if operation.method.upper() == "POST":
            quick(given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))(fuzz))()
    assert min(called.count("/v1/chat/completions"), called.count("/v1/completions")) >= examples
    assert httpx.get(live.url + "/health").status_code == 200


def test_an_event_stream_always_ends_in_done(live):
    body = {"messages": ASK, "stream": True, "max_tokens": 3}
    with httpx.stream("POST", live.url + "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in lines[:-1])
