"""JSON by schema and forced tools through OpenAI's own client, whole and streamed, beside free answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from erniekit.serve import structured
from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    name: str = Field(max_length=4)


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)
    homes: list[City] = Field(max_length=1)


@pytest.fixture(scope="module")
def live(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_folder(paddle, tmp_path_factory.mktemp("structured") / "tiny")
    server = Live(folder, "max_num_seqs=8", "max_new_tokens=150", "temperature=0.7", "top_p=1")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": ASK, "seed": 1, **fields})


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_the_clients_own_parser_of_a_pydantic_class_takes_every_answer(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Person, n=4, seed=2, extra_body={"repetition_penalty": 1.3}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) > 1, "each has a state of its own"


def test_a_streamed_answer_is_the_whole_one(client):
    wanted = schema_of({"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 4})
    whole = ask(client, response_format=wanted).choices[0].message.content
    parts = ask(client, response_format=wanted, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert isinstance(json.loads(whole), list)


def test_json_object_gives_an_object(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=200, temperature=0.2, top_p=0.1)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_comes_whole_and_streamed(client, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = ask(client, **asked).choices
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    given = json.loads(call.function.arguments)
    assert given == {} if call.function.name == "now" else given["city"] in ("Paris", "Rome")
    if choice is NAMED:
        assert call.function.name == "weather"
    parts = [part.choices[0] for part in ask(client, **asked, stream=True)]
    (streamed,) = [one for part in parts for one in part.delta.tool_calls or ()]
    assert streamed.function.model_dump() == call.function.model_dump()
    assert parts[-1].finish_reason == "tool_calls"


def test_a_schema_that_cannot_be_compiled_is_a_400_that_names_the_place(client):
    with pytest.raises(openai.BadRequestError, match="Invalid type: numeric") as error:
        ask(client, response_format=schema_of({"type": "object", "properties": {"a": {"type": "numeric"}}}))
    assert error.value.code == "invalid_schema"
    assert error.value.param == "response_format.json_schema.schema.properties.a"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}]
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, tools=tools, tool_choice="required")
    assert error.value.param == "tools[0].function.parameters"


def test_a_hard_schema_holds_no_other_stream_up(client, live):
    """Compiled in its own thread; a pattern whose automaton is huge has a budget for each mask."""
    word = {"type": "string", "pattern": "^(a|b)*a(a|b){60}$"}
    hard = {"type": "object", "properties": {f"p{n}": word for n in range(200)}, "required": ["p0"]}
    ask(client, max_tokens=4)

    def streamed() -> float:
        """The longest pause between two tokens of a free answer."""
        pause, last = 0.0, None
        for _ in ask(client, max_tokens=150, stream=True, extra_body={"ignore_eos": True}):
            now = time.monotonic()
            pause, last = max(pause, now - (last or now)), now
        return pause

    def hardly() -> Any:
        try:
            return ask(client, response_format=schema_of(hard), max_tokens=40)
        except openai.APIStatusError as error:  # a budget that ran out is an error of this request alone
            return error

    alone = streamed()
    with ThreadPoolExecutor() as pool:
        free = pool.submit(streamed)
        bound = pool.submit(hardly)
        assert free.result() < max(1.0, 5 * alone), f"a pause that a reader would notice; alone {alone:.2f} s"
        bound.result()


def test_schemas_that_compile_for_ever_are_refused_and_take_no_thread_from_others(live):
    endless = {"allOf": [{"type": "string", "pattern": f"(a|b)*{c}(a|b){{15}}"} for c in "abcdefghijklmnopqrst"]}
    with ThreadPoolExecutor(5) as pool:  # more than the threads that may be lost
        asked = list(pool.map(lambda _: live.chat(response_format=schema_of(endless)), range(5)))
    assert {answer.status_code for answer in asked} <= {400, 503}
    assert live.chat(response_format=schema_of({"type": "integer"})).status_code == 200


def test_without_the_library_it_is_refused_with_the_extra_to_install(client, monkeypatch):
    monkeypatch.setattr(structured, "is_installed", lambda: False)
    with pytest.raises(openai.BadRequestError, match=r"erniekit-torch\[structured\]") as error:
        ask(client, response_format={"type": "json_object"})
    assert error.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, tools=TOOLS, tool_choice="required")
    assert error.value.param == "tool_choice"
    assert ask(client, tools=TOOLS, max_tokens=2).choices, "free answers need no library"
