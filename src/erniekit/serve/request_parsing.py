"""Request parsing: an OpenAI request becomes generation jobs with prompt ids, limits and sampling parameters.

Used by api.py. Whatever a client can get wrong in here is a RequestError. A `ParsedRequest` has no prompt ids yet:
rendering and tokenising may take a while, and prompt_work.py does it for api.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from erniekit.data.tokenizer import BEGIN, Tokenizer
from erniekit.printable import counted
from erniekit.serve.detokenizer import TextEnd
from erniekit.serve.engines.base import GenerationJob, Grammar, SamplingParams
from erniekit.serve.engines.vision_input import PromptVision
from erniekit.serve.message_parsing import check_contents, message_row, parse_arguments
from erniekit.serve.output_grammar import OutputGrammar, output_grammar
from erniekit.serve.output_parser import THINK
from erniekit.serve.prompt_worker import ChatPrompt, Failed, TextPrompts
from erniekit.serve.request_error import RequestError
from erniekit.serve.schema import (
    INSTEAD,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
)
from erniekit.serve.vision_prompt import VisionChat, VisionSettings, check_parts, media_refused

AnyRequest = ChatRequest | CompletionRequest | EmbeddingRequest
MAX_IGNORED_NAMES = 16  # ignored fields that a response names
TOO_LONG = "context_length_exceeded"  # OpenAI's code
MAX_LOGPROBS = 2**18  # numbers in one answer: putting it together holds the event loop up


@dataclass(frozen=True)
class ServedModel:
    """A model under the name clients use."""

    name: str
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    longest: int  # prompt and answer, in tokens
    vocab: int  # of the model
    folder: str = ""
    parent: str | None = None  # the base's name, for an adapter
    vision: VisionSettings | None = None  # of a vision-language model
    key: str = ""  # what the engine calls it, where that is not its name

    @property
    def engine_name(self) -> str:
        return self.key or self.name

    def prepare_tokenizer(self) -> None:
        """What is computed at its first use: a second for a large vocabulary, and not a request's."""
        _ = self.tokenizer.widest, self.tokenizer.bytes_of(self.tokenizer.eos_id)


@dataclass(frozen=True)
class SamplingDefaults:
    """The server's own keys: defaults of requests."""

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
class PreparedRequest:
    """A request with its prompt ids: the jobs for the engine, and what their output is parsed by."""

    served: ServedModel
    jobs: tuple[GenerationJob, ...]  # the answers to a prompt are adjacent
    stop: tuple[str, ...]
    chat: bool
    prompts: int = 1
    tools: bool = False
    one_call: bool = False  # an answer ends with its first tool call
    reasoning_open: bool = False  # the prompt has opened the thought
    keep_stop: bool = False  # the stop string that was hit is part of the answer
    echo: tuple[str, ...] = ()  # what each answer begins with

    @property
    def prompt_tokens(self) -> int:
        each = len(self.jobs) // self.prompts
        return sum(len(job.prompt) for job in self.jobs[::each])

    def bound(self, grammar: Grammar) -> PreparedRequest:
        """The same, with answers of this grammar."""
        return replace(self, jobs=tuple(replace(job, grammar=grammar) for job in self.jobs))

    def vision_tokens(self) -> dict[str, int]:
        """Of the prompt's pictures and videos; they are part of prompt_tokens."""
        vision = self.jobs[0].vision
        out = {"image_tokens": 0, "video_tokens": 0}
        for medium in vision.media if vision is not None else ():
            out["video_tokens" if medium.grid[0] > 1 else "image_tokens"] += medium.tokens
        return out


def refuse_unsupported(request: GenerationRequest) -> None:
    chat = isinstance(request, ChatRequest)
    others = (CompletionRequest if chat else ChatRequest).model_fields
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            fix = INSTEAD.get(name, "leave it out")
            raise RequestError(400, f"{name} is not supported here: {fix}", param=name)
        if name in others and value not in (None, False):
            route = "/v1/completions" if chat else "/v1/chat/completions"
            raise RequestError(400, f"{name} is a field of {route} only: leave it out", param=name)


def ignored_fields(request: GenerationRequest) -> list[str]:
    """Names of the request that nothing here reads, fit for a header: clients choose them."""
    names = [name for name in request.model_extra or {} if name not in UNSUPPORTED]
    if isinstance(request, ChatRequest) and request.tool_choice in (None, "auto"):
        # A call that the model is free to make is not held to its schema.
        names += ["strict"] if any(tool.function.get("strict") for tool in request.tools or ()) else []
    return sorted(name for name in names if len(name) <= 64 and name.isascii() and name.isidentifier())[
        :MAX_IGNORED_NAMES
    ]


@dataclass(frozen=True)
class ParsedRequest:
    """A checked request whose prompt is not tokenised yet."""

    request: AnyRequest
    served: ServedModel
    defaults: SamplingDefaults
    work: ChatPrompt | TextPrompts | VisionChat  # no texts in it: all prompts were given as ids
    grammar: OutputGrammar | None = None  # what the answer must be

    @property
    def most(self) -> int:
        """Tokens that a prompt may have: one at least is the answer's. Whether the answer that is requested fits, too,
        is known when they are counted (`check_room`)."""
        return self.served.longest - 1

    def check_room(self, tokens: int) -> None:
        """tokens: of the prompt."""
        limit, room = _limit(self.request), self.served.longest - tokens
        if room < 1:
            raise too_long(self.request, self.served, str(tokens))
        if limit is not None and getattr(self.request, limit) > room:
            raise RequestError(
                400,
                f"this model's context is {self.served.longest} tokens and the prompt has {tokens} of them: "
                f"{limit} is {getattr(self.request, limit)}, and can be {room} at most",
                param=limit,
                code=TOO_LONG,
            )

    @property
    def field(self) -> str:
        return _field(self.request)

    def refuse(self, failed: Failed) -> RequestError:
        """The error response for a prompt that could not be tokenised."""
        if failed.kind == "too long":
            return too_long(self.request, self.served, f"at least {failed.tokens}")
        if failed.kind in ("refused", "beyond"):
            return RequestError(400, failed.message, param=self.field)
        if failed.kind == "media":
            return media_refused(failed)
        if failed.kind == "unable":
            return RequestError(503, failed.message, code="no_media")
        if failed.kind == "no text":
            chat = isinstance(self.request, ChatRequest)
            message = "the messages cannot be rendered as a prompt" if chat else "the prompt is not text"
            return RequestError(400, message, param=self.field)
        if failed.kind == "slow":
            return RequestError(503, "the prompt could not be prepared in time", code="prompt_timeout")
        if failed.kind == "stopping":
            return RequestError(503, "the server is stopping", code="stopping")
        if failed.kind == "changed":
            return RequestError(503, "the model's files have changed: the server must be started again", code="changed")
        return RequestError(500, "the server failed on this request")

    def prepare(self, made: list[list[int]], vision: PromptVision | None = None) -> PreparedRequest:
        """made: the ids of `work`, in its order."""
        if isinstance(self.request, ChatRequest):
            return _prepared_chat(self, self.request, made[0], vision)
        assert isinstance(self.request, CompletionRequest)
        return _prepared_completion(self, self.request, made)


def parse_chat(request: ChatRequest, served: ServedModel, defaults: SamplingDefaults) -> ParsedRequest:
    refuse_unsupported(request)
    check_contents(request.messages)
    grammar = output_grammar(request)
    thinking = defaults.enable_thinking if request.enable_thinking is None else request.enable_thinking
    more = {} if thinking is None else {"enable_thinking": thinking}
    more |= request.chat_template_kwargs or {}
    media = check_parts(request.messages, served.name, served.vision)
    if served.vision is not None:
        return ParsedRequest(request, served, defaults, _vision_chat(request, served, more, media), grammar)
    messages = [message_row(message) for message in request.messages]
    parse_arguments(messages)
    return ParsedRequest(request, served, defaults, ChatPrompt(messages, _tools(request) or None, more), grammar)


def _vision_chat(request: ChatRequest, served: ServedModel, more: dict[str, Any], media: bool) -> VisionChat:
    if _tools(request) or any(message.tool_calls or message.role == "tool" for message in request.messages):
        raise RequestError(400, f"tools are not supported with {served.name}, a vision-language model", param="tools")
    other = next((name for name in more if name != "enable_thinking"), None)
    if other is not None:
        raise RequestError(400, f"the template has no {other!r}: leave it out", param="chat_template_kwargs")
    messages = [{"role": message.role, "content": message.content or ""} for message in request.messages]
    return VisionChat(messages, more.get("enable_thinking"), media)


def parse_completion(request: CompletionRequest, served: ServedModel, defaults: SamplingDefaults) -> ParsedRequest:
    refuse_unsupported(request)
    if request.suffix:
        raise RequestError(400, "suffix is not supported; leave it out", param="suffix")
    if request.echo and request.logprobs is not None:
        raise RequestError(400, "logprobs of a prompt are not given; leave out echo or logprobs", param="echo")
    tokenizer = served.tokenizer
    texts = [prompt for prompt in _prompts(request) if isinstance(prompt, str)]
    parsed = ParsedRequest(request, served, defaults, TextPrompts(texts, opening_id(tokenizer)))
    for prompt in _prompts(request):
        least = tokenizer.least_tokens(len(prompt)) if isinstance(prompt, str) else len(prompt)
        if least > parsed.most:
            raise too_long(request, served, f"{'at least ' if isinstance(prompt, str) else ''}{least}")
        if not isinstance(prompt, str) and max(prompt) >= served.vocab:
            raise RequestError(400, f"token {max(prompt)} is not in the vocabulary of {served.vocab}", param="prompt")
    return parsed


def opening_id(tokenizer: Tokenizer) -> int | None:
    """ERNIE's sentence token belongs to its chat form; elsewhere a begin token opens any text."""
    return tokenizer.begin_id if tokenizer.begin_token != BEGIN else None


def _prepared_chat(
    parsed: ParsedRequest, request: ChatRequest, prompt: list[int], vision: PromptVision | None
) -> PreparedRequest:
    served = parsed.served
    logprobs = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
    job = replace(_make_job(parsed, request, prompt, logprobs), vision=vision)
    opened = served.tokenizer.decode(prompt[-8:]).rstrip().endswith(THINK)
    return PreparedRequest(
        served,
        _repeated(job, request),
        _stop_strings(request),
        chat=True,
        tools=bool(_tools(request)),
        one_call=request.parallel_tool_calls is False,
        reasoning_open=opened,
        keep_stop=request.include_stop_str_in_output,
    )


def _prepared_completion(parsed: ParsedRequest, request: CompletionRequest, made: list[list[int]]) -> PreparedRequest:
    served = parsed.served
    tokenizer, encoded = served.tokenizer, iter(made)
    prompts = _prompts(request)
    jobs: list[GenerationJob] = []
    echo: list[str] = []
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt, str) else prompt
        ids = ids or [tokenizer.eos_id if tokenizer.begin_id is None else tokenizer.begin_id]
        repeated = _repeated(_make_job(parsed, request, ids, request.logprobs), request)
        jobs += repeated
        text = "" if not request.echo else prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        echo += [text] * len(repeated)
    keep = request.include_stop_str_in_output
    stop = _stop_strings(request)
    return PreparedRequest(served, tuple(jobs), stop, False, len(prompts), keep_stop=keep, echo=tuple(echo))


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    given: Any = request.prompt
    single = isinstance(given, str) or isinstance(given[0], int)
    return [given] if single else list(given)


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump() for tool in request.tools or ()] if request.tool_choice != "none" else []


def _answers(request: GenerationRequest) -> int:
    return request.n * (len(_prompts(request)) if isinstance(request, CompletionRequest) else 1)


def _field(request: AnyRequest | GenerationRequest) -> str:
    """That holds the prompt."""
    chat = isinstance(request, ChatRequest)
    return "messages" if chat else "input" if isinstance(request, EmbeddingRequest) else "prompt"


def _limit(request: AnyRequest) -> str | None:
    """The field that limits the answer, where the request sets one."""
    known = type(request).model_fields  # what clients add of their own is not meant
    names = (name for name in ("max_completion_tokens", "max_tokens") if name in known)
    return next((name for name in names if getattr(request, name) is not None), None)


def too_long(request: AnyRequest | GenerationRequest, served: ServedModel, has: str) -> RequestError:
    return RequestError(
        400,
        f"this model's context is {served.longest} tokens and the prompt has {has}: send {served.longest - 1} at most",
        param=_field(request),
        code=TOO_LONG,
    )


def _make_job(
    parsed: ParsedRequest, request: ChatRequest | CompletionRequest, prompt: list[int], logprobs: int | None
) -> GenerationJob:
    parsed.check_room(len(prompt))
    served, defaults, name = parsed.served, parsed.defaults, _limit(request)
    limit = getattr(request, name) if name else min(defaults.max_tokens, served.longest - len(prompt))

    def given_or_default(name: str) -> Any:
        given = getattr(request, name)
        return getattr(defaults, name) if given is None else given

    if logprobs is not None and limit * _answers(request) * (logprobs + 1) > MAX_LOGPROBS:
        raise RequestError(
            400,
            f"{counted(limit, 'token')} x {counted(_answers(request), 'answer')} x "
            f"{counted(logprobs + 1, 'log probability', 'log probabilities')} are more than "
            f"{MAX_LOGPROBS}: request less of one of them",
            param="logprobs",
        )

    vocab = min(served.tokenizer.vocab_size, served.vocab)
    stops = frozenset(_token_ids(request, "stop_token_ids", vocab))
    bound = isinstance(request, ChatRequest) and output_grammar(request) is not None
    sampling = SamplingParams(
        max_tokens=limit,
        # A grammar itself defines where an answer may end.
        min_tokens=0 if bound else min(given_or_default("min_tokens"), limit),
        temperature=given_or_default("temperature"),
        top_p=given_or_default("top_p"),
        top_k=max(0, given_or_default("top_k")),
        repetition_penalty=given_or_default("repetition_penalty"),
        frequency_penalty=given_or_default("frequency_penalty"),
        presence_penalty=given_or_default("presence_penalty"),
        min_p=request.min_p or 0.0,
        allowed=_token_ids(request, "allowed_token_ids", vocab),
        bias=_bias(request, served),
        seed=request.seed,
        logprobs=logprobs,
        ignore_stop=request.ignore_eos and not stops,
    )
    ends = stops if request.ignore_eos and stops else stops | served.stop_ids
    if sampling.min_tokens and sampling.allowed and ends.issuperset(sampling.allowed):
        raise RequestError(
            400,
            f"allowed_token_ids holds only tokens that end an answer, and min_tokens is {sampling.min_tokens}: "
            "allow another token, or send min_tokens 0",
            param="allowed_token_ids",
        )
    stop, salt = _stop_strings(request), request.cache_salt or ""
    text_end = partial(TextEnd, served.tokenizer, stop) if stop and logprobs is not None else None
    return GenerationJob(tuple(prompt), served.engine_name, sampling, ends, vocab, salt=salt, text_end=text_end)


def _token_ids(request: GenerationRequest, name: str, vocab: int) -> tuple[int, ...]:
    given = getattr(request, name) or ()
    if (worst := max(given, default=0)) >= vocab:
        raise RequestError(400, f"{name}: {worst} is not a token id of this model", param=name)
    return tuple(given)


def _bias(request: GenerationRequest, served: ServedModel) -> tuple[tuple[int, float], ...]:
    out = []
    for token, extra in (request.logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and int(token) < served.vocab):
            raise RequestError(400, f"logit_bias: {token!r} is not a token id of this model", param="logit_bias")
        out.append((int(token), extra))
    return tuple(out)


def _repeated(job: GenerationJob, request: GenerationRequest) -> tuple[GenerationJob, ...]:
    """n answers; with a seed each has its own, so that they differ and are reproducible."""
    seed = request.seed
    if seed is None:
        return (job,) * request.n
    return tuple(replace(job, sampling=replace(job.sampling, seed=seed + k)) for k in range(request.n))


def _stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    given = request.stop
    return tuple(string for string in ([given] if isinstance(given, str) else given or ()) if string)
