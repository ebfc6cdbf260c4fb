"""Compiled grammars: what they let through, where a schema is wrong, and what an engine says under one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.devices import pick
from erniekit.serve.engines.base import GenerationJob, SamplingParams
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.output_grammar import OutputGrammar, output_grammar
from erniekit.serve.schema import ChatRequest
from erniekit.serve.schema_check import first_wrong
from erniekit.serve.structured import BadGrammar, CompiledGrammar, TokenTable, build_grammar
from support.engine_jobs import answers, prompts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Rome"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def table(small: Found) -> TokenTable:
    tokenizer = small.tokenizer(None)
    return TokenTable(tokenizer, tokenizer.vocab_size, frozenset({tokenizer.eos_id}))


def grammar_of(**fields: Any) -> OutputGrammar:
    grammar = output_grammar(ChatRequest(messages=[{"role": "user", "content": "hi"}], **fields))
    assert grammar is not None
    return grammar


def of_schema(schema: Any) -> OutputGrammar:
    return grammar_of(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def compile_grammar(grammar: OutputGrammar, table: TokenTable, opened: bool) -> CompiledGrammar:
    """Checked and built, as grammar_work.py does it in a process of its own."""
    if found := first_wrong([(json.loads(part.schema), part.place) for part in grammar.parts]):
        raise BadGrammar(*found)
    return build_grammar(grammar, table, opened)


def takes(small: Found, compiled: CompiledGrammar, text: str) -> bool:
    """Whether each token of the text, and the end behind it, is let through."""
    tokenizer, matcher = small.tokenizer(None), compiled.start()
    ids = [*tokenizer.encode_text(text), tokenizer.eos_id]
    for n, id in enumerate(ids):
        bits = np.unpackbits(matcher.allowed(ids[:n]).view(np.uint8), bitorder="little")
        if not bits[id]:
            return False
    return True


def test_json_of_the_schema_is_let_through_and_nothing_else(small, table):
    compiled = compile_grammar(of_schema(PERSON), table, opened=False)
    assert takes(small, compiled, '{"name": "Ada", "age": 36}')
    assert takes(small, compiled, '{\n  "name": "Ada",\n  "age": 36\n}')
    for wrong in ('{"name": "Ada"}', '{"name": "Augusta", "age": 36}', '{"name": "Ada", "age": 100}', "Ada", ""):
        assert not takes(small, compiled, wrong), wrong


def test_any_object_is_a_json_object(small, table):
    compiled = compile_grammar(grammar_of(response_format={"type": "json_object"}), table, opened=False)
    assert takes(small, compiled, '{"a": [1, {"b": null}]}')
    assert not takes(small, compiled, "[1]")


def test_a_thought_that_the_prompt_opened_comes_before_the_json(small, table):
    compiled = compile_grammar(of_schema(PERSON), table, opened=True)
    assert takes(small, compiled, 'so {"a" is\nnot it</think>\n\n{"name": "Ada", "age": 36}')
    assert not takes(small, compiled, '{"name": "Ada", "age": 36}')


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "fits", "does_not"),
    [
        ({"tool_choice": "required"}, [CALL, NOW, CALL + "\n" + NOW], ["It is sunny."]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL, NOW], [CALL + "\n" + NOW]),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, [CALL], [NOW, CALL + CALL]),
        ({"response_format": {"type": "json_object"}}, [CALL, NOW, "{}"], [CALL + NOW, "{}" + CALL]),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, ["{}"], [CALL]),
    ],
    ids=["required", "one at most", "named", "json or a call", "json alone"],
)
def test_calls_are_let_through_as_tool_choice_says(small, table, fields, fits, does_not):
    compiled = compile_grammar(grammar_of(tools=TOOLS, **fields), table, opened=False)
    assert [takes(small, compiled, text) for text in fits] == [True] * len(fits)
    wrong = [*does_not, CALL.replace("Rome", "Oslo"), CALL.replace("weather", "other")]
    assert [takes(small, compiled, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"type": "text"}, "", "Invalid type: text"),
        ({"properties": {"a": 1}}, ".properties.a", "must be an object or boolean"),
        ({"$ref": "#"}, None, "no value fits the schema"),
        ({"properties": {"a": {"items": {"type": "x"}}}}, ".properties.a.items", "Invalid type: x"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(", "type": "string"}]}, ".anyOf[1]", "unclosed group"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, ".$defs.a", "not supported"),
        ({"$ref": "#/$defs/b"}, "", "does not exist"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "", "minimum"),
        (False, "", "false"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_place_that_is_wrong(table, schema, place, why):
    with pytest.raises(BadGrammar, match=why) as bad:
        compile_grammar(of_schema(schema), table, opened=False)
    assert bad.value.place == ("response_format" if place is None else "response_format.json_schema.schema" + place)


def test_a_schema_cannot_turn_the_servers_limits_off(table, small):
    """Its own x-guidance has no effect: neither endless blanks nor keywords that are passed over."""
    with pytest.raises(BadGrammar, match="not supported"):
        compile_grammar(
            of_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), table, False
        )
    blanks = of_schema({**PERSON, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " *"}})
    assert not takes(small, compile_grammar(blanks, table, False), '{        "name": "Ada", "age": 36}')


def test_a_large_schema_is_refused_before_it_is_compiled():
    from erniekit.serve.request_error import RequestError

    for schema in ({"enum": ["x" * 70_000]}, {"properties": {f"p{n}": {"type": "null"} for n in range(1000)}}):
        with pytest.raises(RequestError, match=r"the limit is|may have") as problem:
            of_schema(schema)
        assert problem.value.status == 400


# --- in an engine


@pytest.fixture(params=["plain steps", "recorded steps"])
def engine(request: pytest.FixtureRequest, small: Found) -> Iterator[EmbeddedEngine]:
    model = small.build()
    cache = PagedCache(model.config, 64, 4, torch.float32, "cpu")
    limits = EngineLimits(sequences=5, tokens=16, length=96)
    made = EmbeddedEngine({"m": model}, cache, limits, pick("cpu", False) if "recorded" in request.param else None)
    yield made
    made.stop()


def job(small: Found, prompt: list[int], **wishes: Any) -> GenerationJob:
    tokenizer = small.tokenizer(None)
    sampling = SamplingParams(**{"max_tokens": 60, "temperature": 0.8, "seed": 3, **wishes})
    return GenerationJob(tuple(prompt), "m", sampling, frozenset({tokenizer.eos_id}), tokenizer.vocab_size)


def test_answers_keep_to_their_own_grammar_and_the_others_say_what_they_say_alone(engine, small, table):
    """Every step has rows with and without a grammar; sequences are evicted and computed again on the way."""
    tokenizer = small.tokenizer(None)
    person = compile_grammar(of_schema(PERSON), table, opened=False)
    number = compile_grammar(of_schema({"type": "integer", "minimum": 0, "maximum": 9}), table, opened=False)
    asked = prompts(6, seed=4)
    free = [job(small, prompt, max_tokens=12) for prompt in asked[:3]]
    alone = answers(engine, free)
    bound = [replace(job(small, prompt), grammar=person) for prompt in asked[3:5]]
    bound += [replace(job(small, asked[5], temperature=0.0), grammar=number)]
    found = answers(engine, [*free, *bound])
    assert found[:3] == alone
    texts = [tokenizer.decode(ids) for ids in found[3:]]
    for text in texts[:2]:
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 4
        assert 0 <= value["age"] <= 99
    assert 0 <= int(texts[2]) <= 9
    assert engine.load().cache_used == 0


def test_recorded_steps_draw_under_a_grammar_what_plain_steps_draw(small, table):
    person = compile_grammar(of_schema(PERSON), table, opened=False)
    jobs = [replace(job(small, prompt), grammar=person) for prompt in prompts(3, seed=7)]
    said = []
    for device in (None, pick("cpu", False)):
        model = small.build()
        cache = PagedCache(model.config, 64, 4, torch.float32, "cpu")
        engine = EmbeddedEngine({"m": model}, cache, EngineLimits(sequences=3, tokens=16, length=96), device)
        said.append(answers(engine, jobs))
        engine.stop()
    assert said[0] == said[1]


def test_proposals_change_nothing_under_a_grammar(table, tmp_path):
    moe = find_model(make_tiny_model(tmp_path, family="ernie4_5_moe"))
    person = compile_grammar(of_schema(PERSON), table, opened=False)
    jobs = [job(moe, prompt, max_tokens=30) for prompt in prompts(4, seed=7)]
    jobs[:2] = [replace(one, grammar=person) for one in jobs[:2]]
    said = []
    for proposals in (0, 2):
        model = moe.build()
        cache = PagedCache(model.config, 96, 4, torch.float32, "cpu", mtp=proposals > 0)
        limits = EngineLimits(sequences=4, tokens=16, length=96, proposals=proposals)
        engine = EmbeddedEngine({"m": model}, cache, limits)
        said.append(answers(engine, jobs))
        engine.stop()
    assert said[0] == said[1]
    assert engine.load().proposed > 0, "the others had no proposals"


def test_the_library_is_imported_where_schemas_are_checked_and_compiled_alone():
    source = Path(__file__).resolve().parents[3] / "src" / "erniekit"
    naming = [file.name for file in source.rglob("*.py") if "from llguidance" in file.read_text(encoding="utf-8")]
    assert sorted(naming) == ["schema_check.py", "structured.py"]
