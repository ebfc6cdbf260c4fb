"""Embeddings through OpenAI's own client: the pooled states that the model has in training."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import erniekit
from support.serving import Live, tiny_folder

pytestmark = pytest.mark.xdist_group("server")

TEXTS = ["hello there", "a much longer text than the first one, of several chunks of the engine's steps " * 2, "你好"]


@pytest.fixture(scope="module")
def folder(paddle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("embedded") / "tiny")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    server = Live(folder, "max_model_len=256", "max_num_seqs=4", "block_size=8", "max_num_batched_tokens=24")
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return live.client()


@torch.no_grad()
def states_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """What the trainer's model hands to its head: a whole forward pass without a cache."""
    model: Any = erniekit.load(folder)[0]
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, given, out: seen.append(out))
    model(torch.tensor([ids]))
    (states,) = seen
    return states.reshape(-1, states.shape[-1])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_is_the_pooled_state_of_the_trainers_forward_pass(client, live, folder, pooling):
    tokenizer = live.loaded.models["tiny"].tokenizer
    found = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling, "normalize": False})
    for text, item in zip(TEXTS, found.data):
        states = states_of(folder, tokenizer.encode_text(text))
        wanted = states.mean(0) if pooling == "mean" else states[-1]
        # fp32, in chunks over a cache against one pass; base64 is fp32 too.
        torch.testing.assert_close(torch.tensor(item.embedding), wanted, rtol=1e-5, atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(tokenizer.encode_text(text)) for text in TEXTS)


def test_vectors_have_length_one_and_do_not_depend_on_form_or_company(client, live):
    tokenizer = live.loaded.models["tiny"].tokenizer
    one = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float").data[0].embedding
    assert sum(number * number for number in one) == pytest.approx(1)

    def again(_: int) -> list[list[float]]:
        ids = [tokenizer.encode_text(text) for text in TEXTS]
        return [item.embedding for item in client.embeddings.create(model="tiny", input=ids).data]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(again, range(8)):
            assert found[0] == pytest.approx(one, abs=1e-6)
    assert live.idle(), "every block of the cache is free"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": "a", "dimensions": 4}, 400, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 4}, 400, "truncate_prompt_tokens"),
        ({"input": "word " * 400}, 400, "input"),
        ({"input": [10**6]}, 400, "input"),
        ({"input": [1] * 300}, 400, "input"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "pooling": "max"}, 422, "pooling"),
        ({"input": []}, 422, "input"),
        ({"input": ["a", []]}, 422, "input"),
        ({"input": [1.5]}, 422, "input"),
        ({"input": None}, 422, "input"),
        ({}, 422, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(live, fields, status, param):
    answer = live.post("/v1/embeddings", fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(("route", "name"), [("embeddings", "input"), ("completions", "prompt")])
def test_an_empty_list_is_called_empty_and_not_a_wrong_kind(live, route, name):
    said = [live.post(f"/v1/{route}", {name: given}).json()["error"]["message"] for given in ([], ["a", []], {"a": 1})]
    kinds = "a text, a list of token ids, or a list of several of them is needed"
    assert said == [f"{name}: the list is empty; {kinds}", f"{name}: item 1 is an empty list", f"{name}: {kinds}"]
