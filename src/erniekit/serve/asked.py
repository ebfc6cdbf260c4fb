"""From a request as it came to jobs an engine can do: prompt ids, limits, sampling. Called by api.py.

Whatever a client can get wrong in here is a Problem. A `Question` has no ids yet: making them may take a while, and
prompt_work.py does it for api.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from erniekit.data.tokenizer import BEGIN, Tokenizer
from erniekit.files.json_file import nests_deeper
from erniekit.serve.engines.base import Choosing, Job
from erniekit.serve.problem import Problem
from erniekit.serve.prompt_work import RENDER_S
from erniekit.serve.prompt_worker import Conversation, Failed, Texts, Work, prepare
from erniekit.serve.schema import UNSUPPORTED, ChatRequest, CompletionRequest, Message, Wishes
from erniekit.serve.speech import THINK

MOST_NAMED = 16  # ignored fields that a response names
MOST_ARGUMENTS = 2**18  # characters of tool calls' arguments that are read as JSON, of a whole request
MOST_LOGPROBS = 2**18  # numbers in one answer: putting it together holds the event loop up


@dataclass(frozen=True)
class Served:
    """A model under the name clients use."""

    name: str
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    longest: int  # prompt and answer, in tokens
    vocab: int  # of the model
    folder: str = ""
    parent: str | None = None  # the base's name, for an adapter


@dataclass(frozen=True)
class Defaults:
    """The server's own keys: what a request that does not say gets."""

    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    enable_thinking: bool | None = None  # None: as the template has it


@dataclass(frozen=True)
class Asked:
    served: Served
    jobs: tuple[Job, ...]  # the answers to a prompt stand together
    stop: tuple[str, ...]
    chat: bool
    prompts: int = 1
    tools: bool = False
    thinks: bool = False  # the prompt has opened the thought
    echo: tuple[str, ...] = ()  # what each answer begins with

    @property
    def prompt_tokens(self) -> int:
        each = len(self.jobs) // self.prompts
        return sum(len(job.prompt) for job in self.jobs[::each])


def refuse_unsupported(request: Wishes) -> None:
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            raise Problem(400, f"{name} is not supported; leave it out", param=name)


def ignored_fields(request: Wishes) -> list[str]:
    """Names of the request that nothing here reads, fit for a header: clients choose them."""
    names = [name for name in request.model_extra or {} if name not in UNSUPPORTED]
    return sorted(name for name in names if len(name) <= 64 and name.isascii() and name.isidentifier())[:MOST_NAMED]


@dataclass(frozen=True)
class Question:
    """A request that has been read: what ids are to be made of, and what the jobs are then."""

    request: ChatRequest | CompletionRequest
    served: Served
    defaults: Defaults
    work: Conversation | Texts  # Texts may be none: all prompts were given as ids

    @property
    def most(self) -> int:
        """Tokens that a prompt may have beside the answer that is asked for."""
        return self.served.longest - (_most_tokens(self.request) or 1)

    @property
    def field(self) -> str:
        return "messages" if isinstance(self.request, ChatRequest) else "prompt"

    def refuse(self, failed: Failed) -> Problem:
        """What the client is told about prompt work that gave no ids."""
        if failed.kind == "too long":
            return too_long(self.request, self.served, f"at least {failed.tokens}")
        if failed.kind in ("refused", "beyond"):
            return Problem(400, failed.message, param=self.field)
        if failed.kind == "no text":
            chat = isinstance(self.request, ChatRequest)
            words = "the messages are no text that can be put into a prompt" if chat else "the prompt is no text"
            return Problem(400, words, param=self.field)
        if failed.kind == "slow":
            return Problem(503, "the prompt could not be prepared in time", code="prompt_timeout")
        if failed.kind == "stopping":
            return Problem(503, "the server is stopping", code="stopping")
        if failed.kind == "changed":
            return Problem(503, "the model's files have changed: the server must be started again", code="changed")
        return Problem(500, "the server failed on this request")

    def asked(self, made: list[list[int]]) -> Asked:
        """made: the ids of `work`, in its order."""
        if isinstance(self.request, ChatRequest):
            return _asked_chat(self, self.request, made[0])
        return _asked_completion(self, self.request, made)


def read_chat(request: ChatRequest, served: Served, defaults: Defaults) -> Question:
    refuse_unsupported(request)
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise Problem(400, f"response_format {kind!r} is not supported; leave it out", param="response_format")
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise Problem(400, "tool_choice can be auto or none: a call cannot be forced", param="tool_choice")
    thinking = defaults.enable_thinking if request.enable_thinking is None else request.enable_thinking
    more = {} if thinking is None else {"enable_thinking": thinking}
    more |= request.chat_template_kwargs or {}
    messages = [_message(message) for message in request.messages]
    _parse_arguments(messages)
    return Question(request, served, defaults, Conversation(messages, _tools(request) or None, more))


def read_completion(request: CompletionRequest, served: Served, defaults: Defaults) -> Question:
    refuse_unsupported(request)
    if request.suffix:
        raise Problem(400, "suffix is not supported; leave it out", param="suffix")
    if request.echo and request.logprobs is not None:
        raise Problem(400, "logprobs of a prompt are not given; leave out echo or logprobs", param="echo")
    tokenizer = served.tokenizer
    # ERNIE's sentence token belongs to its chat form; elsewhere a begin token opens any text.
    opening = tokenizer.begin_id if tokenizer.begin_token != BEGIN else None
    texts = [prompt for prompt in _prompts(request) if isinstance(prompt, str)]
    question = Question(request, served, defaults, Texts(texts, opening))
    for prompt in _prompts(request):
        least = tokenizer.least_tokens(len(prompt)) if isinstance(prompt, str) else len(prompt)
        if least > question.most:
            raise too_long(request, served, f"{'at least ' if isinstance(prompt, str) else ''}{least}")
        if not isinstance(prompt, str) and max(prompt) >= served.vocab:
            raise Problem(400, f"token {max(prompt)} is not in the vocabulary of {served.vocab}", param="prompt")
    return question


def ask_chat(request: ChatRequest, served: Served, defaults: Defaults) -> Asked:
    """All of it, here and now."""
    return _ask(read_chat(request, served, defaults))


def ask_completion(request: CompletionRequest, served: Served, defaults: Defaults) -> Asked:
    """All of it, here and now."""
    return _ask(read_completion(request, served, defaults))


def _ask(question: Question) -> Asked:
    made = prepare(Work(question.work, question.most, RENDER_S), question.served.tokenizer)
    if isinstance(made, Failed):
        raise question.refuse(made)
    return question.asked(made)


def _asked_chat(question: Question, request: ChatRequest, prompt: list[int]) -> Asked:
    served = question.served
    logprobs = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
    job = _job(request, prompt, served, question.defaults, logprobs)
    opened = served.tokenizer.decode(prompt[-8:]).rstrip().endswith(THINK)
    return Asked(served, _repeated(job, request), _stop(request), True, 1, bool(_tools(request)), opened)


def _asked_completion(question: Question, request: CompletionRequest, made: list[list[int]]) -> Asked:
    served = question.served
    tokenizer, encoded = served.tokenizer, iter(made)
    prompts = _prompts(request)
    jobs: list[Job] = []
    echo: list[str] = []
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt, str) else prompt
        ids = ids or [tokenizer.eos_id if tokenizer.begin_id is None else tokenizer.begin_id]
        repeated = _repeated(_job(request, ids, served, question.defaults, request.logprobs), request)
        jobs += repeated
        text = "" if not request.echo else prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        echo += [text] * len(repeated)
    return Asked(served, tuple(jobs), _stop(request), False, len(prompts), echo=tuple(echo))


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    given: Any = request.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    return [given] if single else list(given)


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump() for tool in request.tools or ()] if request.tool_choice != "none" else []


def _answers(request: Wishes) -> int:
    return request.n * (len(_prompts(request)) if isinstance(request, CompletionRequest) else 1)


def _most_tokens(request: Wishes) -> int | None:
    """That an answer may have, where the request says it."""
    return (request.max_completion_tokens if isinstance(request, ChatRequest) else None) or request.max_tokens


def too_long(request: Wishes, served: Served, has: str) -> Problem:
    most = _most_tokens(request)
    wants = f" and {most} for the answer" if most else ""
    return Problem(
        400,
        f"this model's context is {served.longest} tokens; the prompt has {has}{wants}",
        param="messages" if isinstance(request, ChatRequest) else "prompt",
        code="context_length_exceeded",
    )


def _message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        other = next((part["type"] for part in content if part["type"] != "text" or part.get("text") is None), None)
        if other is not None:
            raise Problem(
                400, f"a message part of type {other!r} is not supported: this model takes text", param="messages"
            )
        content = "".join(part.get("text") or "" for part in content)
    out: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send back a call's arguments as text; templates want them as they were (_parse_arguments)."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Problem(400, "a tool call needs function: {name, arguments}", param="messages")
    return {**call, "function": dict(function)}


def _parse_arguments(messages: list[dict[str, Any]]) -> None:
    """The text of arguments is what gate.py has not looked into. Too long or too deep a one stays text."""
    left = MOST_ARGUMENTS
    for function in (call["function"] for message in messages for call in message.get("tool_calls", ())):
        text = function.get("arguments")
        if not isinstance(text, str) or len(text) > left:
            continue
        left -= len(text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not nests_deeper(value):
            function["arguments"] = value


def _job(request: Wishes, prompt: list[int], served: Served, defaults: Defaults, logprobs: int | None) -> Job:
    room, most = served.longest - len(prompt), _most_tokens(request)
    if room < (most or 1):
        raise too_long(request, served, str(len(prompt)))
    limit = most or min(defaults.max_tokens, room)

    def wish(name: str) -> Any:
        given = getattr(request, name)
        return getattr(defaults, name) if given is None else given

    if logprobs is not None and limit * _answers(request) * (logprobs + 1) > MOST_LOGPROBS:
        raise Problem(
            400,
            f"{limit} tokens x {_answers(request)} answers x {logprobs + 1} log probabilities are more than "
            f"{MOST_LOGPROBS}: ask for less of one of them",
            param="logprobs",
        )

    choosing = Choosing(
        max_tokens=limit,
        min_tokens=min(wish("min_tokens"), limit),
        temperature=wish("temperature"),
        top_p=wish("top_p"),
        top_k=max(0, wish("top_k")),
        repetition_penalty=wish("repetition_penalty"),
        frequency_penalty=wish("frequency_penalty"),
        presence_penalty=wish("presence_penalty"),
        bias=_bias(request, served),
        seed=request.seed,
        logprobs=logprobs,
        ignore_stop=request.ignore_eos,
    )
    vocab = min(served.tokenizer.vocab_size, served.vocab)
    return Job(tuple(prompt), served.name, choosing, served.stop_ids, vocab)


def _bias(request: Wishes, served: Served) -> tuple[tuple[int, float], ...]:
    out = []
    for token, extra in (request.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and int(token) < served.vocab):
            raise Problem(400, f"logit_bias: {token!r} is not a token id of this model", param="logit_bias")
        out.append((int(token), extra))
    return tuple(out)


def _repeated(job: Job, request: Wishes) -> tuple[Job, ...]:
    """n answers; with a seed each has its own, so that they differ and come again."""
    seed = request.seed
    if seed is None:
        return (job,) * request.n
    return tuple(replace(job, choosing=replace(job.choosing, seed=seed + k)) for k in range(request.n))


def _stop(request: Wishes) -> tuple[str, ...]:
    given = request.stop
    return tuple(word for word in ([given] if isinstance(given, str) else given or ()) if word)
