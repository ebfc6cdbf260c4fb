"""The OpenAI routes over an engine: `make_app` gives the ASGI application. Called by server.py and by tests.

request_parsing.py turns a request into generation jobs, running_request.py runs them and detokenizes their tokens, and
response_builder.py makes OpenAI's objects of the text.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from erniekit.log import warn
from erniekit.net.connections import CONNECTION
from erniekit.net.hosts import Hosts
from erniekit.serve.disconnect import until_disconnect
from erniekit.serve.embeddings import embedding_page, parse_embedding, pooled
from erniekit.serve.engines.base import InferenceEngine, ModelRemoved
from erniekit.serve.engines.vision_input import FeatureCache
from erniekit.serve.grammar_work import GrammarWork
from erniekit.serve.health import HealthMonitor
from erniekit.serve.media_turns import MediaSettings
from erniekit.serve.media_work import MediaReader, read_vision
from erniekit.serve.metrics import TYPE, Metrics
from erniekit.serve.middleware import (
    MAX_BODY_BYTES,
    BodyLimit,
    Middleware,
    Receive,
    Scope,
    Send,
    error_response,
    read_json,
)
from erniekit.serve.openapi import body_of, name_schemas
from erniekit.serve.prompt_work import PromptLimits, PromptLoad, PromptWork
from erniekit.serve.prompt_worker import Failed, TextPrompts
from erniekit.serve.request_error import RequestError, as_json
from erniekit.serve.request_parsing import (
    ParsedRequest,
    PreparedRequest,
    SamplingDefaults,
    ServedModel,
    ignored_fields,
    parse_chat,
    parse_completion,
)
from erniekit.serve.response_builder import ResponseBuilder, as_event
from erniekit.serve.running_request import ChoiceDelta, RunningRequest
from erniekit.serve.runtime_adapters import RuntimeAdapters
from erniekit.serve.schema import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from erniekit.serve.vision_prompt import VisionChat
from erniekit.serve.work_queue import Busy, Late, Stuck
from erniekit.version import __version__

DONE = b"data: [DONE]\n\n"
IGNORED = "X-Ignored-Fields"
VISION_BODY_BYTES = 32 * 2**20  # of a chat with a vision-language model
MAX_LOGGED_NAMES = 64  # field names; clients can make up any number


@dataclass(frozen=True)
class ApiSettings:
    defaults: SamplingDefaults
    timeout: float = 600.0  # seconds an answer may take, its time in the queue included
    key: str | None = None
    created: int = 0
    hosts: Hosts | None = None  # the names it is reached by; None: any
    prompts: PromptLimits = field(default_factory=PromptLimits)  # of the work on prompts
    media: MediaSettings = field(default_factory=MediaSettings)  # of decoding, for vision-language models
    adapters: RuntimeAdapters | None = None  # those that come and go
    details: bool = False  # usage counts the tokens of a prompt that were cached


class Api:
    """models: by name, the default one first."""

    def __init__(self, engine: InferenceEngine, models: Mapping[str, ServedModel], settings: ApiSettings) -> None:
        self.engine, self.models, self.settings = engine, models, settings
        self.metrics = Metrics()
        self.prompts = PromptWork(settings.prompts)
        self.grammars = GrammarWork()
        vision = next((served.vision for served in models.values() if served.vision is not None), None)
        self.media = None if vision is None else MediaReader(vision.rules.limits, settings.media)
        self.body = BodyLimit(MAX_BODY_BYTES if vision is None else VISION_BODY_BYTES)
        self.running_requests: weakref.WeakSet[RunningRequest] = weakref.WeakSet()
        self.monitor = HealthMonitor(engine, self.prompts)
        for served in models.values():
            served.prepare_tokenizer()
        self.ignored: set[str] = set()  # field names the log has named

    # --- routes

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        body = await read_json(request, ChatRequest, self.body)
        return await self._answer(request, body, parse_chat)

    async def completions(self, request: Request) -> Response:
        """Continuations of texts."""
        body = await read_json(request, CompletionRequest)
        return await self._answer(request, body, parse_completion)

    async def embeddings(self, request: Request) -> Response:
        """A vector for each input: pooled hidden states."""
        body = await read_json(request, EmbeddingRequest)
        parsed = parse_embedding(body, self._find_model(body.model), self.settings.defaults)

        async def work() -> Response:
            prepared = await self._prepared(parsed)
            self.metrics.prompt_tokens += prepared.prompt_tokens
            try:
                vectors = await pooled(prepared, self.engine, self.settings.timeout)
            except ModelRemoved:
                raise self._removed(prepared.served.name) from None
            return _json(embedding_page(body, prepared, vectors))

        answer: Response | None = await until_disconnect(request.receive, work())
        return Response(status_code=499) if answer is None else answer

    async def load_adapter(self, request: Request) -> Response:
        """Serve an adapter by name, from a folder that the server may load from."""
        body = await read_json(request, LoadAdapterRequest)
        message = await self._adapters().load(body.lora_name, body.lora_path, body.load_inplace)
        return Response(message, media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        """Stop serving such an adapter; its running answers end as they would."""
        body = await read_json(request, UnloadAdapterRequest)
        return Response(self._adapters().unload(body.lora_name), media_type="text/plain")

    def _adapters(self) -> RuntimeAdapters:
        if self.settings.adapters is None:
            raise RequestError(403, "adapters cannot be loaded here", code="adapters_not_allowed")
        return self.settings.adapters

    async def list_models(self) -> Response:
        """The models that can be requested by name."""
        return _json({"object": "list", "data": [self._card(served) for served in self.models.values()]})

    async def one_model(self, model: str) -> Response:
        """One of them."""
        return _json(self._card(self._find_model(model)))

    async def health(self) -> Response:
        """200 while requests can be answered."""
        self.monitor.start()
        load, prompts = self.engine.load(), self._prompt_load()
        reason = self.monitor.reason(load)
        state = {
            "status": "ok" if reason is None else "failing",
            "running": load.running,
            "waiting": load.waiting,
            "prompts_running": prompts.running,
            "prompts_waiting": prompts.waiting,
        }
        return _json(state, 200) if reason is None else _json({**state, "reason": reason}, 503)

    async def prometheus(self) -> Response:
        """What is counted, for Prometheus."""
        load = self.engine.load()
        healthy = self.monitor.reason(load) is None
        return Response(self.metrics.text(load, self._prompt_load(), healthy, self.monitor.lag), media_type=TYPE)

    def _prompt_load(self) -> PromptLoad:
        load = self.prompts.load()
        return load if self.media is None else load.plus(self.media.load())

    # --- one request

    async def _answer(self, request: Request, body: GenerationRequest, prepare: Any) -> Response:
        arrived = time.monotonic()
        self.monitor.start()
        parsed: ParsedRequest = prepare(body, self._find_model(body.model), self.settings.defaults)
        prepared: PreparedRequest | None = await until_disconnect(request.receive, self._prepared(parsed))
        if prepared is None:
            self.metrics.disconnects += 1
            return Response(status_code=499)  # the client has disconnected
        left = arrived + self.settings.timeout - time.monotonic()
        try:
            running_request = RunningRequest(prepared, self.engine, left, not body.stream, self.settings.details)
        except ModelRemoved:
            raise self._removed(prepared.served.name) from None
        self.running_requests.add(running_request)
        builder = ResponseBuilder(running_request, prepared.jobs[0].sampling.logprobs is not None)
        self.metrics.prompt_tokens += prepared.prompt_tokens
        headers = self._name_ignored(body)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(self, running_request, self._events(running_request, builder, usage), headers)
        parts = await until_disconnect(request.receive, _collect(running_request))
        self._count(running_request)
        if parts is None:
            self.metrics.disconnects += 1
            return Response(status_code=499)  # the client has disconnected
        return _json(builder.whole(parts), headers=headers)

    def end_answers(self) -> None:
        """Waiting requests get an error: for the end, when an engine or a tokenizer hangs."""
        self.prompts.end()
        self.grammars.end()
        if self.media is not None:
            self.media.end()
        for running_request in list(self.running_requests):
            running_request.stop()

    async def _prepared(self, parsed: ParsedRequest) -> PreparedRequest:
        """The request's jobs, its prompt prepared in time or a RequestError."""
        try:
            given = isinstance(parsed.work, TextPrompts) and not parsed.work.texts  # all of them as ids
            made = ([],) if given else await self._read_prompt(parsed)
        except Busy:
            raise RequestError(
                429, "the server is busy: too many prompts wait", code="queue_full", headers={"Retry-After": "2"}
            ) from None
        except Late:
            made = Failed("slow", "its deadline passed")
        except Stuck:
            raise RequestError(503, "the server cannot prepare prompts now", code="stuck") from None
        if isinstance(made, Failed):
            if made.kind in ("slow", "changed", "fault"):
                warn(f"a prompt was not prepared: {made.message}")
            raise parsed.refuse(made)
        prepared = parsed.prepare(*made)
        if self.models.get(parsed.served.name) is not parsed.served:
            raise self._removed(parsed.served.name)
        if parsed.grammar is None:
            return prepared
        return prepared.bound(await self.grammars.compile(parsed.grammar, parsed.served, prepared.reasoning_open))

    async def _read_prompt(self, parsed: ParsedRequest) -> Any:
        """What `parsed.prepare` takes, or Failed."""
        timeout = self.settings.timeout
        if isinstance(parsed.work, VisionChat):
            assert self.media is not None
            features = getattr(self.engine, "features", None) or FeatureCache(0)
            found = await read_vision(parsed, self.prompts, self.media, features, timeout)
            return found if isinstance(found, Failed) else ([found[0]], found[1])
        made = await self.prompts.ids(parsed.work, parsed.served.tokenizer, parsed.most, timeout)
        return made if isinstance(made, Failed) else (made,)

    def _name_ignored(self, body: GenerationRequest) -> dict[str, str]:
        """Fields that had no effect: in a header of every answer, and the first time each in the server's log."""
        names = ignored_fields(body)
        new = [name for name in names if name not in self.ignored]
        if new and len(self.ignored) < MAX_LOGGED_NAMES:
            self.ignored.update(new)
            warn(f"requests hold fields that have no effect here: {', '.join(new)}")
        return {IGNORED: ", ".join(names)} if names else {}

    async def _events(
        self, running_request: RunningRequest, builder: ResponseBuilder, usage: bool
    ) -> AsyncIterator[bytes]:
        """Ends in [DONE] or in an error, whatever happens."""
        try:
            async for part in running_request.parts():
                if event := builder.events(part, usage):
                    yield event
            if usage:
                yield as_event(builder.usage_chunk())
            yield DONE
        except RequestError as problem:
            yield as_event(problem.body())
        except Exception as error:
            warn(f"a stream failed: {type(error).__name__}: {error}")
            yield as_event(RequestError(500, "the server failed on this request").body())

    def _count(self, running_request: RunningRequest) -> None:
        self.metrics.generated_tokens += running_request.generated
        self.metrics.duration.add(time.monotonic() - running_request.began)
        if running_request.first is not None:
            self.metrics.first_token.add(running_request.first - running_request.began)

    def _find_model(self, name: str) -> ServedModel:
        if name in self.models:
            return self.models[name]
        if name == "default":
            return next(iter(self.models.values()))
        raise _no_model(name)

    def _removed(self, name: str) -> RequestError:
        """For a request whose adapter was unloaded or replaced while its prompt or schema was prepared."""
        if name in self.models:
            return RequestError(409, f"model {name!r} was replaced meanwhile: send the request again", param="model")
        return _no_model(name)

    def _card(self, served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self.settings.created,
            "owned_by": "erniekit",
            "root": served.folder,
            "parent": served.parent,
            "max_model_len": served.longest,
        }


def _no_model(name: str) -> RequestError:
    message = f"there is no model {name!r} here: /v1/models lists them"[:400]
    return RequestError(404, message, param="model", code="model_not_found")


class EventStream(Response):
    """Server-sent events that stop as soon as the client disconnects, also before the first."""

    def __init__(
        self, api: Api, running_request: RunningRequest, events: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> None:
        plain = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers={**plain, **headers})
        del self.headers["content-length"]
        self.api, self.running_request, self.events = api, running_request, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> bool:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            connection = scope.get(CONNECTION)
            async for event in self.events:
                if connection is None or not await connection.write_chunk(event):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True

        try:
            if await until_disconnect(receive, pump()) is None:
                self.api.metrics.disconnects += 1
        finally:
            self.api.engine.cancel(self.running_request.stream)
            self.api._count(self.running_request)


async def _collect(running_request: RunningRequest) -> list[ChoiceDelta]:
    return [part async for part in running_request.parts()]


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def make_app(engine: InferenceEngine, models: Mapping[str, ServedModel], settings: ApiSettings) -> Middleware:
    """The application; `draining = True` on it refuses new requests while running ones finish."""
    api = Api(engine, models, settings)
    app = FastAPI(title="erniekit", version=__version__, docs_url=None, redoc_url=None)
    for path, method, route, body in (
        ("/v1/chat/completions", "POST", api.chat, ChatRequest),
        ("/v1/completions", "POST", api.completions, CompletionRequest),
        ("/v1/embeddings", "POST", api.embeddings, EmbeddingRequest),
        ("/v1/load_lora_adapter", "POST", api.load_adapter, LoadAdapterRequest),
        ("/v1/unload_lora_adapter", "POST", api.unload_adapter, UnloadAdapterRequest),
        ("/v1/models", "GET", api.list_models, None),
        ("/v1/models/{model:path}", "GET", api.one_model, None),
        ("/health", "GET", api.health, None),
        ("/metrics", "GET", api.prometheus, None),
    ):
        app.add_api_route(
            path, route, methods=[method], response_class=Response, openapi_extra=body_of(body), summary=route.__doc__
        )
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_exception)
    name_schemas(app)
    paths = frozenset(route.path for route in app.routes if "{" not in route.path)  # type: ignore[attr-defined]
    app.state.api = api
    return Middleware(app, settings.key, api.metrics, paths, settings.hosts)


async def _on_request_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestError)
    return error_response(problem)


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(RequestError(500, "the server failed on this request"))


async def _on_http(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our shape."""
    assert isinstance(error, HTTPException)
    messages = {404: "not found: no such endpoint", 405: "this endpoint does not support that method"}
    return error_response(
        RequestError(error.status_code, messages.get(error.status_code, "bad request"), headers=error.headers)
    )
