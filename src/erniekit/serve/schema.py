"""The request schema: OpenAI's two requests, their numbers bounded. Used by api.py, which shows it as OpenAPI.

Fields that would change the answer and that no engine here supports are refused by name (UNSUPPORTED, used by
request_parsing.py). Others are ignored, since clients send fields of newer interfaces and notes of their own, and named
in a response header.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from typing_extensions import Required, TypedDict  # pydantic needs these before Python 3.12

MAX_PARTS = 1024  # of a message
MAX_COMPLETIONS = 128  # of one request: prompts times n
MAX_PROMPTS, MAX_INPUTS = 32, 256  # of one request for completions, and for embeddings
MAX_STOPS, MAX_STOP_CHARACTERS = 8, 64
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: pydantic makes an error of each item that does not fit, and a list may have many.
TEXT_OR_IDS = "a text, a list of token ids, or a list of several of them"
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def _text_or_ids(value: Any, most: int) -> Any:
    """Checked first: of a union pydantic names each kind that the value is not, the wrong one first. most: items."""
    if not isinstance(value, str | list):
        raise ValueError(f"{TEXT_OR_IDS} is needed")
    if not value and isinstance(value, list):
        raise ValueError(f"the list is empty; {TEXT_OR_IDS} is needed")
    if isinstance(value, list) and not isinstance(value[0], int):
        if len(value) > most:
            raise ValueError(f"{len(value):,} items are too many for one request; the limit is {most}")
        for k, item in enumerate(value):
            if not isinstance(item, str | list):
                raise ValueError(f"item {k} is neither a text nor a list of token ids")
            if not item and isinstance(item, list):
                raise ValueError(f"item {k} is an empty list")
            if isinstance(item, list):
                _check_ids(item, f"item {k} of ")
    elif isinstance(value, list):
        _check_ids(value)
    return value


def _check_ids(ids: list[Any], of: str = "") -> None:
    """By functions of C first: a prompt may have many ids."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31:
        return
    k, wrong = next((k, id) for k, id in enumerate(ids) if type(id) is not int or not 0 <= id < 2**31)
    shown = str(wrong) if isinstance(wrong, int | float) and not isinstance(wrong, bool) else type(wrong).__name__
    raise ValueError(f"{of}item {k} is {shown[:40]}; a token id is a whole number from 0 on")


class _Object(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


# Fields of OpenAI's and of other servers' interfaces that change an answer, and the values that request nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "bad_words_ids": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "priority": (0,),
    "prompt_logprobs": (0,),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
INSTEAD = {  # of some of them
    "bad_words": "logit_bias can forbid tokens",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_json": "use response_format",
    "reasoning_effort": "use enable_thinking",
    "structured_outputs": "use response_format",
}


class StreamOptions(_Object):
    include_usage: bool = False


class GenerationRequest(_Object):
    """What both requests have in common. None: the server's own key decides. Unknown fields are in model_extra."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field("default", max_length=256, description="One of /v1/models, or `default`.")
    n: int = Field(1, ge=1, le=8, description="Answers to give.")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: no limit.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    logit_bias: dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=300
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the likeliest's chance.")
    allowed_token_ids: list[TokenId] | None = Field(None, max_length=4096, description="No other tokens may be drawn.")
    seed: Int64 | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="Continue past the model's end token, up to max_tokens.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Cached prefixes are shared only between requests of the same salt."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _few_short_strings(cls, stop: Any) -> Any:
        """As for prompts: a union's own message would be of the kind that was not meant."""
        strings = stop if isinstance(stop, list) else [] if stop is None else [stop]
        if len(strings) > MAX_STOPS:
            raise ValueError(f"{len(strings):,} strings are too many; the limit is {MAX_STOPS}")
        if not all(isinstance(string, str) for string in strings):
            raise ValueError("a string or a list of strings is needed; stop_token_ids takes token ids")
        if (longest := max(map(len, strings), default=0)) > MAX_STOP_CHARACTERS:
            raise ValueError(f"a string of {longest:,} characters is too long; the limit is {MAX_STOP_CHARACTERS}")
        return stop


class MessagePart(TypedDict, total=False):
    """A dict: a message may have hundreds, and a model of each costs ten times as much to check."""

    type: Required[Annotated[str, Field(max_length=32)]]
    text: str | None
    image_url: str | dict[str, Any] | None  # of vision-language models; only `data:` URLs are read
    video_url: str | dict[str, Any] | None


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[MessagePart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_parts(cls, content: Any) -> Any:
        """Said here: of a union pydantic names each kind that it is not, the wrong one first."""
        if isinstance(content, list) and len(content) > MAX_PARTS:
            raise ValueError(f"{len(content):,} parts are too many; a message may have {MAX_PARTS:,}")
        if not isinstance(content, str | list | None):
            raise ValueError("content is text or a list of parts")
        return content


class Tool(_Object):
    type: Literal["function"] = "function"
    function: dict[str, Any]


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="OpenAI's newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='none, auto, required, or {"type": "function", "function": {"name": ...}}.'
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most.")
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, or json_schema with json_schema: {schema: ...}."
    )
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=32)


class EmbeddingRequest(BaseModel):
    """Unknown fields are in model_extra."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field("default", max_length=256, description="One of /v1/models, or `default`.")
    input: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    _kind = field_validator("input", mode="before")(partial(_text_or_ids, most=MAX_INPUTS))
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = Field("mean", description="Of the last hidden states of an input's tokens.")
    normalize: bool = Field(True, description="To length 1.")


class LoadAdapterRequest(_Object):
    lora_name: str = Field(max_length=256)
    lora_path: str = Field(max_length=4096, description="Below a folder of the server's lora_dirs.")
    load_inplace: bool = Field(False, description="Take the place of a loaded adapter of that name.")


class UnloadAdapterRequest(_Object):
    lora_name: str = Field(max_length=256)


class CompletionRequest(GenerationRequest):
    prompt: (
        str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description=f"Prompts times n are {MAX_COMPLETIONS} at most.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None

    _kind = field_validator("prompt", mode="before")(partial(_text_or_ids, most=MAX_PROMPTS))

    @field_validator("prompt")
    @classmethod
    def _few_enough(cls, prompt: Any, info: ValidationInfo) -> Any:
        count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        answers = count * info.data.get("n", 1)
        if answers > MAX_COMPLETIONS:
            raise ValueError(f"{answers} answers are requested (prompts times n); the limit is {MAX_COMPLETIONS}")
        return prompt
