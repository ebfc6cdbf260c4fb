"""What a client may ask: OpenAI's two requests, their numbers bounded. Read by api.py and shown as the OpenAPI schema.

Unknown fields are ignored, as clients of newer versions send them; what we know and cannot do is refused in asked.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(max_length=64)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Object(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(_Object):
    include_usage: bool = False


class Wishes(_Object):
    """What both requests have in common. None: the server's own key decides."""

    model: str = Field("default", max_length=256, description="One of /v1/models, or `default`.")
    n: int = Field(1, ge=1, le=8, description="Answers to give.")
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[Annotated[str, Field(max_length=10)], Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=300
    )
    seed: Whole | None = None
    stop: Word | Annotated[list[Word], Field(max_length=8)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="Go on past the model's own end, up to max_tokens.")


class TextPart(_Object):
    type: str = Field(max_length=32)
    text: str | None = None


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)


class Tool(_Object):
    type: Literal["function"] = "function"
    function: dict[str, Any]


class ChatRequest(Wishes):
    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="OpenAI's newer word for max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=32)


class CompletionRequest(Wishes):
    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=32)]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    suffix: str | None = None
