"""/v1/embeddings: texts or token ids in, one pooled vector of the model's last hidden states each. Used by api.py."""

from __future__ import annotations

import array
import asyncio
import base64
import math
from dataclasses import dataclass
from typing import Any

from erniekit.serve.engines.base import Done, GenerationJob, InferenceEngine, Pooled, SamplingParams
from erniekit.serve.engines.vision_input import PromptVision
from erniekit.serve.prompt_worker import TextPrompts
from erniekit.serve.request_error import NO_NUMBER, RequestError
from erniekit.serve.request_parsing import (
    ParsedRequest,
    PreparedRequest,
    SamplingDefaults,
    ServedModel,
    opening_id,
    too_long,
)
from erniekit.serve.running_request import submit
from erniekit.serve.schema import EmbeddingRequest


@dataclass(frozen=True)
class ParsedEmbedding(ParsedRequest):
    """Its `prepare` makes a job of each input."""

    def prepare(self, made: list[list[int]], vision: PromptVision | None = None) -> PreparedRequest:
        assert isinstance(self.request, EmbeddingRequest)
        served, encoded = self.served, iter(made)
        jobs = []
        for given in inputs(self.request):
            ids = next(encoded) if isinstance(given, str) else given
            if not ids:
                raise RequestError(400, "input holds an empty text", param="input")
            pooling = self.request.pooling
            sampling = SamplingParams(max_tokens=1)
            jobs.append(GenerationJob(tuple(ids), served.engine_name, sampling, frozenset(), 1, pooling=pooling))
        return PreparedRequest(served, tuple(jobs), (), False, len(jobs))


def inputs(request: EmbeddingRequest) -> list[str | list[int]]:
    given: Any = request.input
    single = isinstance(given, str) or isinstance(given[0], int)
    return [given] if single else list(given)


def parse_embedding(request: EmbeddingRequest, served: ServedModel, defaults: SamplingDefaults) -> ParsedEmbedding:
    for name, value in (request.model_extra or {}).items():
        if name not in ("user", "request_id") and value is not None:
            raise RequestError(400, f"{name} is not supported here: leave it out", param=name[:60])
    texts = [given for given in inputs(request) if isinstance(given, str)]
    parsed = ParsedEmbedding(request, served, defaults, TextPrompts(texts, opening_id(served.tokenizer)))
    for given in inputs(request):
        if isinstance(given, str):
            continue
        if len(given) > parsed.most:
            raise too_long(request, served, str(len(given)))
        if max(given) >= served.vocab:
            raise RequestError(400, f"token {max(given)} is not in the vocabulary of {served.vocab}", param="input")
    return parsed


async def pooled(prepared: PreparedRequest, engine: InferenceEngine, timeout: float) -> list[tuple[float, ...]]:
    """A vector for each job. Raises ModelRemoved."""
    stream = submit(prepared, engine)
    found: dict[int, tuple[float, ...]] = {}

    async def collect() -> None:
        async for number, event in stream:
            if isinstance(event, Pooled):
                found[number] = event.vector
            elif isinstance(event, Done) and event.reason == "error":
                raise RequestError(500, event.message)

    try:
        await asyncio.wait_for(collect(), timeout)
    except asyncio.TimeoutError:
        raise RequestError(504, "the answer took longer than this server allows", code="timeout") from None
    finally:
        engine.cancel(stream)
    return [found[number] for number in range(len(prepared.jobs))]


def embedding_page(request: EmbeddingRequest, prepared: PreparedRequest, vectors: list[tuple[float, ...]]) -> Any:
    """OpenAI's object."""
    shaped = [_unit(vector) if request.normalize else vector for vector in vectors]
    if not all(map(math.isfinite, (number for vector in shaped for number in vector))):
        raise RequestError(500, f"{NO_NUMBER} for this input")
    data = [
        {"object": "embedding", "index": k, "embedding": _encoded(vector, request.encoding_format)}
        for k, vector in enumerate(shaped)
    ]
    used = {"prompt_tokens": prepared.prompt_tokens, "total_tokens": prepared.prompt_tokens}
    return {"object": "list", "data": data, "model": prepared.served.name, "usage": used}


def _unit(vector: tuple[float, ...]) -> tuple[float, ...]:
    length = math.sqrt(math.fsum(number * number for number in vector))
    return tuple(number / length for number in vector) if length else vector


def _encoded(vector: tuple[float, ...], form: str) -> Any:
    """base64: little-endian fp32, which OpenAI's client requests by default."""
    if form == "float":
        return list(vector)
    return base64.b64encode(array.array("f", vector).tobytes()).decode()
