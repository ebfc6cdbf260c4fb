"""The OpenAI routes over an engine: `make_app` gives the ASGI application. Called by server.py and by tests.

A request becomes jobs (asked.py), jobs become text (answer.py), text becomes OpenAI's objects (shapes.py).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from erniekit.log import warn
from erniekit.net.hosts import Hosts
from erniekit.serve.answer import Answering, Part
from erniekit.serve.asked import Asked, Defaults, Question, Served, ignored_fields, read_chat, read_completion
from erniekit.serve.engines.base import Engine
from erniekit.serve.gate import Gate, Receive, Scope, Send, read_json, reply
from erniekit.serve.health import Watch
from erniekit.serve.metrics import TYPE, Metrics
from erniekit.serve.problem import Problem, as_json
from erniekit.serve.prompt_work import Busy, Late, Limits, PromptWork, Stuck
from erniekit.serve.prompt_worker import Failed, Texts
from erniekit.serve.schema import ChatRequest, CompletionRequest, Wishes
from erniekit.serve.shapes import Shape
from erniekit.version import __version__

DONE = b"data: [DONE]\n\n"
IGNORED = "X-Ignored-Fields"
MOST_LOGGED = 64  # field names; clients can make up any number


@dataclass(frozen=True)
class Settings:
    defaults: Defaults
    timeout: float = 600.0  # seconds an answer may take, its time in the queue included
    key: str | None = None
    created: int = 0
    hosts: Hosts | None = None  # the names it is reached by; None: any
    prompts: Limits = field(default_factory=Limits)  # of the work on prompts


class Api:
    """models: by name, the default one first."""

    def __init__(self, engine: Engine, models: Mapping[str, Served], settings: Settings) -> None:
        self.engine, self.models, self.settings = engine, models, settings
        self.metrics = Metrics()
        self.prompts = PromptWork(settings.prompts)
        self.answering: weakref.WeakSet[Answering] = weakref.WeakSet()
        self.watch = Watch(engine, self.prompts)
        for served in models.values():
            _ = served.tokenizer.widest  # a second for a large vocabulary, and not a request's
        self.ignored: set[str] = set()  # field names the log has named

    # --- routes

    async def chat(self, request: Request) -> Response:
        """An answer to a conversation."""
        asked = await read_json(request, ChatRequest)
        return await self._answer(request, asked, read_chat)

    async def completions(self, request: Request) -> Response:
        """How texts go on."""
        asked = await read_json(request, CompletionRequest)
        return await self._answer(request, asked, read_completion)

    async def list_models(self) -> Response:
        """The models that can be asked for by name."""
        return _json({"object": "list", "data": [self._card(served) for served in self.models.values()]})

    async def one_model(self, model: str) -> Response:
        """One of them."""
        return _json(self._card(self._served(model)))

    async def health(self) -> Response:
        """200 while requests can be answered."""
        self.watch.start()
        load, prompts = self.engine.load(), self.prompts.load()
        reason = self.watch.reason(load)
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
        healthy = self.watch.reason(load) is None
        return Response(self.metrics.text(load, self.prompts.load(), healthy, self.watch.lag), media_type=TYPE)

    # --- the way of an answer

    async def _answer(self, request: Request, wishes: Wishes, prepare: Any) -> Response:
        arrived = time.monotonic()
        self.watch.start()
        question: Question = prepare(wishes, self._served(wishes.model), self.settings.defaults)
        asked: Asked | None = await unless_gone(request.receive, self._asked(question))
        if asked is None:
            self.metrics.disconnects += 1
            return Response(status_code=499)  # nobody reads it
        left = arrived + self.settings.timeout - time.monotonic()
        answering = Answering(asked, self.engine, left, not wishes.stream)
        self.answering.add(answering)
        shape = Shape(answering, asked.jobs[0].choosing.logprobs is not None)
        self.metrics.prompt_tokens += asked.prompt_tokens
        headers = self._name_ignored(wishes)
        if wishes.stream:
            usage = wishes.stream_options is not None and wishes.stream_options.include_usage
            return EventStream(self, answering, self._events(answering, shape, usage), headers)
        parts = await unless_gone(request.receive, _collect(answering))
        self._count(answering)
        if parts is None:
            self.metrics.disconnects += 1
            return Response(status_code=499)  # nobody reads it
        return _json(shape.whole(parts), headers=headers)

    def end_answers(self) -> None:
        """Whoever still waits is told that the server stops: for the end, when an engine or a tokenizer hangs."""
        self.prompts.end()
        for answering in list(self.answering):
            answering.stop()

    async def _asked(self, question: Question) -> Asked:
        """The request's jobs, its prompt prepared in time or a Problem."""
        if isinstance(question.work, Texts) and not question.work.texts:
            return question.asked([])
        tokenizer, timeout = question.served.tokenizer, self.settings.timeout
        try:
            made = await self.prompts.ids(question.work, tokenizer, question.most, timeout)
        except Busy:
            raise Problem(
                429, "the server is busy: too many prompts wait", code="queue_full", headers={"Retry-After": "2"}
            ) from None
        except Late:
            made = Failed("slow", "its deadline passed")
        except Stuck:
            raise Problem(503, "the server cannot prepare prompts now", code="stuck") from None
        if isinstance(made, Failed):
            if made.kind in ("slow", "changed", "fault"):
                warn(f"a prompt was not prepared: {made.message}")
            raise question.refuse(made)
        return question.asked(made)

    def _name_ignored(self, wishes: Wishes) -> dict[str, str]:
        """Fields that had no effect: in a header of every answer, and the first time each in the server's log."""
        names = ignored_fields(wishes)
        new = [name for name in names if name not in self.ignored]
        if new and len(self.ignored) < MOST_LOGGED:
            self.ignored.update(new)
            warn(f"requests hold fields that have no effect here: {', '.join(new)}")
        return {IGNORED: ", ".join(names)} if names else {}

    async def _events(self, answering: Answering, shape: Shape, usage: bool) -> AsyncIterator[bytes]:
        """Ends in [DONE] or in an error, whatever happens."""
        try:
            async for part in answering.parts():
                for chunk in shape.chunks(part):
                    yield _event({**chunk, "usage": None} if usage else chunk)
            if usage:
                yield _event(shape.usage_chunk())
            yield DONE
        except Problem as problem:
            yield _event(problem.body())
        except Exception as error:
            warn(f"a stream failed: {type(error).__name__}: {error}")
            yield _event(Problem(500, "the server failed on this request").body())

    def _count(self, answering: Answering) -> None:
        self.metrics.generated_tokens += answering.said
        self.metrics.duration.add(time.monotonic() - answering.began)
        if answering.first is not None:
            self.metrics.first_token.add(answering.first - answering.began)

    def _served(self, name: str) -> Served:
        if name in self.models:
            return self.models[name]
        if name == "default":
            return next(iter(self.models.values()))
        raise Problem(
            404, f"there is no model {name!r} here: /v1/models lists them"[:400], param="model", code="model_not_found"
        )

    def _card(self, served: Served) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": self.settings.created,
            "owned_by": "erniekit",
            "root": served.folder,
            "parent": served.parent,
            "max_model_len": served.longest,
        }


class EventStream(Response):
    """Server-sent events that stop being made as soon as nobody listens, also while the first is waited for."""

    def __init__(
        self, api: Api, answering: Answering, events: AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> None:
        plain = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers={**plain, **headers})
        del self.headers["content-length"]
        self.api, self.answering, self.events = api, answering, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pump() -> bool:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True

        try:
            if await unless_gone(receive, pump()) is None:
                self.api.metrics.disconnects += 1
        finally:
            self.api.engine.cancel(self.answering.stream)
            self.api._count(self.answering)


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`, or None when the client left first; then the work is cancelled."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _collect(answering: Answering) -> list[Part]:
    return [part async for part in answering.parts()]


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, media_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


def make_app(engine: Engine, models: Mapping[str, Served], settings: Settings) -> Gate:
    """The application; `gate.draining = True` turns new questions away while old ones are answered."""
    api = Api(engine, models, settings)
    app = FastAPI(title="erniekit", version=__version__, docs_url=None, redoc_url=None)
    for path, method, route, body in (
        ("/v1/chat/completions", "POST", api.chat, ChatRequest),
        ("/v1/completions", "POST", api.completions, CompletionRequest),
        ("/v1/models", "GET", api.list_models, None),
        ("/v1/models/{model:path}", "GET", api.one_model, None),
        ("/health", "GET", api.health, None),
        ("/metrics", "GET", api.prometheus, None),
    ):
        app.add_api_route(
            path, route, methods=[method], response_class=Response, openapi_extra=_body_of(body), summary=route.__doc__
        )
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_fault)
    _name_schemas(app)
    paths = frozenset(route.path for route in app.routes if "{" not in route.path)  # type: ignore[attr-defined]
    app.state.api = api
    return Gate(app, settings.key, api.metrics, paths, settings.hosts)


async def _on_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return reply(problem)


async def _on_fault(request: Request, error: Exception) -> Response:
    return reply(Problem(500, "the server failed on this request"))


async def _on_http(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our shape."""
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this address", 405: "this address does not take that method"}
    return reply(Problem(error.status_code, words.get(error.status_code, "bad request"), headers=error.headers))


def _body_of(kind: type[Wishes] | None) -> dict[str, Any]:
    if kind is None:
        return {}
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _name_schemas(app: FastAPI) -> None:
    """The bodies are read by hand, so their schemas are put into the OpenAPI page by hand."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        page = plain()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        for kind in (ChatRequest, CompletionRequest) if ChatRequest.__name__ not in schemas else ():
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        return page

    app.openapi = openapi  # type: ignore[method-assign]
