"""From a request as it came to jobs an engine can do: prompt ids, limits, sampling. Called by api.py, in a thread.

Whatever a client can get wrong in here is a Problem; tokenising and templates may take a while for long prompts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from erniekit.data.template import TemplateRefused, prompt_ids
from erniekit.data.tokenizer import BEGIN, Tokenizer
from erniekit.errors import CheckpointError
from erniekit.serve.engines.base import Choosing, Job
from erniekit.serve.problem import Problem
from erniekit.serve.schema import UNSUPPORTED, ChatRequest, CompletionRequest, Message, Wishes
from erniekit.serve.speech import THINK

MOST_NAMED = 16  # ignored fields that a response names


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


def ask_chat(request: ChatRequest, served: Served, defaults: Defaults) -> Asked:
    refuse_unsupported(request)
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise Problem(400, f"response_format {kind!r} is not supported; leave it out", param="response_format")
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise Problem(400, "tool_choice can be auto or none: a call cannot be forced", param="tool_choice")
    tools = [tool.model_dump() for tool in request.tools or ()] if choice != "none" else []
    thinking = defaults.enable_thinking if request.enable_thinking is None else request.enable_thinking
    more = {} if thinking is None else {"enable_thinking": thinking}
    more |= request.chat_template_kwargs or {}
    messages = [_message(message) for message in request.messages]
    try:
        prompt = prompt_ids(messages, served.tokenizer, tools or None, variables=more)
    except TemplateRefused as refused:
        raise Problem(400, str(refused), param="messages") from None
    except CheckpointError as beyond:  # a token without a row in the embedding
        raise Problem(400, beyond.what, param="messages") from None
    except (UnicodeEncodeError, RecursionError, TypeError, KeyError, AttributeError):
        raise Problem(400, "the messages are no text that can be put into a prompt", param="messages") from None
    most = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
    job = _job(request, prompt, served, defaults, most, logprobs)
    opened = served.tokenizer.decode(prompt[-8:]).rstrip().endswith(THINK)
    return Asked(served, _repeated(job, request), _stop(request), True, 1, bool(tools), opened)


def ask_completion(request: CompletionRequest, served: Served, defaults: Defaults) -> Asked:
    refuse_unsupported(request)
    if request.suffix:
        raise Problem(400, "suffix is not supported; leave it out", param="suffix")
    if request.echo and request.logprobs is not None:
        raise Problem(400, "logprobs of a prompt are not given; leave out echo or logprobs", param="echo")
    given = request.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    prompts: list[Any] = [given] if single else list(given)
    jobs: list[Job] = []
    echo: list[str] = []
    for prompt in prompts:
        ids = _ids(prompt, served)
        job = _job(request, ids, served, defaults, request.max_tokens, request.logprobs)
        repeated = _repeated(job, request)
        jobs += repeated
        text = prompt if isinstance(prompt, str) else served.tokenizer.decode(ids)
        echo += [text if request.echo else ""] * len(repeated)
    return Asked(served, tuple(jobs), _stop(request), False, len(prompts), echo=tuple(echo))


def _message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        other = next((part.type for part in content if part.type != "text" or part.text is None), None)
        if other is not None:
            raise Problem(
                400, f"a message part of type {other!r} is not supported: this model takes text", param="messages"
            )
        content = "".join(part.text or "" for part in content)
    out: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Clients send back a call's arguments as text; templates want them as they were."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Problem(400, "a tool call needs function: {name, arguments}", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # then as the text it is
    return {**call, "function": {**function, "arguments": arguments}}


def _ids(prompt: str | list[int], served: Served) -> list[int]:
    tokenizer = served.tokenizer
    if not isinstance(prompt, str):
        if max(prompt) >= served.vocab:
            raise Problem(400, f"token {max(prompt)} is not in the vocabulary of {served.vocab}", param="prompt")
        return prompt
    # ERNIE's sentence token belongs to its chat form; elsewhere a begin token opens any text.
    opening = tokenizer.begin_id if tokenizer.begin_token != BEGIN else None
    try:
        ids = [*([] if opening is None else [opening]), *tokenizer.encode_text(prompt)]
    except UnicodeEncodeError:
        raise Problem(400, "the prompt holds half a character", param="prompt") from None
    except CheckpointError as beyond:  # a token without a row in the embedding
        raise Problem(400, beyond.what, param="prompt") from None
    return ids or [tokenizer.eos_id if tokenizer.begin_id is None else tokenizer.begin_id]


def _job(
    request: Wishes, prompt: list[int], served: Served, defaults: Defaults, most: int | None, logprobs: int | None
) -> Job:
    room = served.longest - len(prompt)
    if room < (most or 1):
        wants = f" and {most} for the answer" if most else ""
        raise Problem(
            400,
            f"this model's context is {served.longest} tokens; the prompt has {len(prompt)}{wants}",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    limit = most or min(defaults.max_tokens, room)

    def wish(name: str) -> Any:
        given = getattr(request, name)
        return getattr(defaults, name) if given is None else given

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
