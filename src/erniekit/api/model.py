"""Model: what `erniekit.load` gives. Logits by calling it, text by `generate` and `chat` (the embedded engine)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from erniekit.api.tokenizer import TextTokenizer, check_messages
from erniekit.api_load import Found, dtype_of, find_model
from erniekit.config.convert import convert
from erniekit.config.flat import KEYS
from erniekit.devices import AUTO, DEVICES, INSTALLED, pick
from erniekit.errors import CheckpointError, ConfigError, DataError, DeviceError
from erniekit.models.score_head import refuse as refuse_score_head
from erniekit.serve.engines.base import GenerationJob, SamplingParams
from erniekit.serve.folder import stop_ids
from erniekit.serve.shared_weights import second_tree
from erniekit.serve.text_engine import NAME, TextAnswer, TextEngine

LENGTH = 2048  # tokens the engine allocates for each answer, until a longer one is requested
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Generation:
    """An answer with all that is known of it (`details=True`)."""

    text: str
    ids: list[int] = field(repr=False)  # as generated, without the token that ended it
    finish_reason: str = "stop"  # stop: the model or a stop string ended it; length: max_new_tokens or the context did
    prompt_tokens: int = 0
    reasoning: str = ""  # what a thinking model thought before it answered
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form
    logprobs: list[float] | None = field(default=None, repr=False)  # of each id, where requested


class Model:
    """A model and its tokenizer.

    `model(input_ids)` gives logits [batch, length, vocab]; `model.generate(...)` and `model.chat(...)` give text;
    `model.module` is the torch module and `model.tokenizer` its tokenizer (None where the folder has none).
    `module, tokenizer = erniekit.load(folder)` works as well.
    """

    def __init__(self, found: Found, dtype: torch.dtype | None, device: torch.device) -> None:
        self._found = found
        self.tokenizer: Any = None  # a TextTokenizer, where the folder has one
        if found.has_tokenizer_files():  # broken ones fail before weights are read
            self.tokenizer = TextTokenizer.over(found.tokenizer())
        base = Found(found.weights).build(dtype, device)
        self._base, self.module = base, base
        if found.adapter is not None:
            self.module = second_tree(base, found)
            found.check(self.module)
        self._engine: TextEngine | None = None
        self._release: weakref.finalize[Any, Any] | None = None

    @property
    def folder(self) -> Path:
        """Where it was read from: the adapter's folder where there is one."""
        return self._found.adapter or self._found.weights.path

    @property
    def config(self) -> Any:
        """Sizes of the model: hidden_size, num_layers, vocab_size, max_positions, ..."""
        return self._found.weights.config

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.module.parameters()).dtype

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.module.parameters())
        return f"<erniekit.Model {self._found.describe()}: {count:,} weights, {self.dtype} on {self.device}>"

    def __iter__(self) -> Iterator[Any]:
        """The module and the tokenizer: `module, tokenizer = erniekit.load(folder)`."""
        return iter((self.module, self.tokenizer))

    def __getitem__(self, number: int) -> Any:
        return (self.module, self.tokenizer)[number]

    def __call__(self, input_ids: torch.Tensor, *args: Any, attention_mask: Any = None, **more: Any) -> torch.Tensor:
        """Logits [batch, length, vocab] of ids [batch, length]. attention_mask: taken along from a tokenizer; padding
        on the right changes no logits before it, and padding on the left is refused."""
        if attention_mask is not None and not bool(torch.as_tensor(attention_mask)[:, :1].all()):
            raise DataError("rows are padded on the left", where="attention_mask", fix='padding_side="right"')
        result: torch.Tensor = self.module(input_ids, *args, **more)
        return result

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        min_tokens: int = 0,
        temperature: float = 0.95,
        top_p: float = 0.7,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        stream: bool = False,
        details: bool = False,
        logprobs: bool = False,
        batch_size: int = 8,
        tools: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """Text that follows a prompt.

        Returns text, or a list of texts for a batch. Messages are answered with their thought left out, which
        `details=True` has.

        prompt: a text to continue, a list of messages ({"role": ..., "content": ...}) to answer, or a list of token
            ids; or a list of any of these, which are computed together
        max_new_tokens, min_tokens: longest and shortest answer
        temperature, top_p, top_k: how the next token is drawn, as in `erniekit chat`; temperature=0 always takes the
            likeliest
        repetition_penalty, frequency_penalty, presence_penalty: against tokens already in the text
        stop: a text, or several, that end the answer and are left out of it
        seed: the same answer each time; each prompt of a batch has its own
        stream: an iterator of pieces of text as they come; of (number of the prompt, piece) for a batch
        details: `Generation` objects instead of text
        logprobs: with the log-probability of each token, in the details
        batch_size: prompts that are computed at once
        tools: functions the model may call, in OpenAI's form
        variables: what the chat template reads, such as enable_thinking=True
        """
        refuse_score_head(self.config.labels, "generate", str(self.folder))
        if stream and (details or logprobs):
            raise ConfigError(
                "a stream yields pieces of text, without details or log-probabilities",
                where="generate(stream=True)",
                fix="details=True without stream",
            )
        single, prompts = _listed(prompt)
        tokenizer = self._need_tokenizer()
        tokenizer.check_variables(variables, tools, Model.generate)
        given = dict(
            max_new_tokens=max_new_tokens, min_tokens=min_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
        )  # fmt: skip
        checked = {name: convert(KEYS[name], value, f"generate({name}=...)") for name, value in given.items()}
        limit = checked.pop("max_new_tokens")
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        answers, jobs = [], []
        for number, one in enumerate(prompts):
            ids, chat = self._ids(one, tools, variables)
            most = self._answer_limit(ids, limit)
            params = SamplingParams(
                most,
                **{**checked, "min_tokens": min(checked["min_tokens"], most)},
                seed=None if seed is None else seed + number,
                logprobs=0 if logprobs else None,
            )
            vocab = min(tokenizer.vocab_size, self.config.vocab_size)
            jobs.append(GenerationJob(tuple(ids), NAME, params, self._ends(), vocab))
            answers.append(TextAnswer(ids, tokenizer, stop_strings, chat, bool(tools)))
        longest = max((len(job.prompt) + job.sampling.max_tokens for job in jobs), default=0)
        engine = self._engine_for(min(max(1, batch_size), max(1, len(jobs))), longest + 1)
        if stream:
            return _stream(engine, jobs, answers, single)
        for _ in engine.pieces(jobs, answers):
            pass
        made = [_result(answer, logprobs) if details else answer.text for answer in answers]
        return made[0] if single else made

    def chat(self, message: str | Sequence[Mapping[str, Any]], system: str = "", **settings: Any) -> Any:
        """The answer to a question, or to a list of messages. settings: those of `generate`."""
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return self.generate(messages, **settings)

    def close(self) -> None:
        """Ends the engine's threads and lets its memory go; the model stays, and `generate` starts it again."""
        if self._release is not None:
            self._release()
        self._engine = self._release = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _need_tokenizer(self) -> TextTokenizer:
        if not isinstance(self.tokenizer, TextTokenizer):
            raise CheckpointError(
                f"{self.folder} holds a model without a tokenizer",
                where=str(self.folder),
                fix="copy tokenizer.model or tokenizer.json next to its config.json; logits need none: model(ids)",
            )
        return self.tokenizer

    def _ids(self, prompt: Any, tools: Any, variables: Mapping[str, Any]) -> tuple[list[int], bool]:
        """A prompt's ids, and whether it is a conversation."""
        tokenizer = self._need_tokenizer()
        if isinstance(prompt, str):
            ids, chat = tokenizer.encode(prompt), False
        elif isinstance(prompt, Sequence) and prompt and all(map(_is_id, prompt)):
            ids, chat = [int(one) for one in prompt], False
            if max(ids) >= self.config.vocab_size or min(ids) < 0:
                raise DataError(
                    f"token {max(ids)} is not in the vocabulary of {self.config.vocab_size}",
                    where="prompt",
                    fix="ids of this model's own tokenizer",
                )
        else:
            check_messages(prompt)
            ids, chat = (
                tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, **variables),
                True,
            )
        return ids or [tokenizer.eos_id if tokenizer.begin_id is None else tokenizer.begin_id], chat

    def _answer_limit(self, ids: list[int], wanted: int) -> int:
        available = self.config.max_positions - len(ids)
        if available < 1:
            raise DataError(
                f"the prompt is {len(ids)} tokens long; this model takes {self.config.max_positions} with the answer",
                where="prompt",
                fix="shorten it",
            )
        return min(wanted, available)

    def _ends(self) -> frozenset[int]:
        tokenizer = self._need_tokenizer()
        return frozenset({tokenizer.eos_id, tokenizer.end_id, *stop_ids(self._found)})

    def _engine_for(self, sequences: int, length: int) -> TextEngine:
        """The engine; a larger one replaces it if its cache is too small."""
        engine = self._engine
        if engine is not None and engine.sequences >= sequences and engine.length >= length:
            return engine
        if engine is not None:
            sequences, length = max(sequences, engine.sequences), max(length, engine.length)
            self.close()
        length = max(length, min(LENGTH, self.config.max_positions))
        made = TextEngine(second_tree(self._base, self._found), self.config, sequences, length)
        self._engine, self._release = made, weakref.finalize(self, made.close)
        return made


def load(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    *,
    base: str | Path | None = None,
    override_base: bool = False,
) -> Model:
    """Opens a model on this disk: a base, an adapter, a merged export, a checkpoint-N or the output_dir of a run.

    A damaged or incomplete tokenizer is an error; adapters stay separate from the weights.

    folder: of a base, an adapter, a checkpoint or a run
    dtype: as stored when not given; bf16 and fp32 work as names
    device: torch's name (cpu, cuda, cuda:1) or a value of the key `device`, such as auto
    base: the model an adapter sits on, when the place its config names is gone
    override_base: takes another base than the adapter was trained on
    """
    return Model(find_model(folder, base, override_base=override_base), dtype_of(dtype), _device(device))


def _device(given: str | torch.device) -> torch.device:
    try:
        named = torch.device(given)
    except RuntimeError:
        name = str(given)
    else:
        return _present(named)
    if name != AUTO and name not in DEVICES and name not in INSTALLED:
        raise ConfigError(
            f"device {name!r} is not known", where="device", fix=f"cpu, cuda:N, {AUTO}, {', '.join(DEVICES)}"
        )
    handle: torch.device = pick(name).handle
    return handle


def _present(device: torch.device) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"device {str(device)!r} cannot be used: {str(error).strip().splitlines()[0]}",
            where="device",
            fix=f"device={AUTO!r} takes what this machine has; `erniekit doctor` shows it",
        ) from None
    return device


def _listed(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and all of them."""
    if isinstance(prompt, str):
        return True, [prompt]
    if hasattr(prompt, "tolist"):  # a tensor of ids: one row, or several
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(
            f"the prompt is {_described(prompt)}",
            where="generate",
            fix="a text, a list of messages, a list of token ids, or a list of these",
        )
    single = isinstance(prompt[0], Mapping) or _is_id(prompt[0])
    return single, [prompt] if single else list(prompt)


def _described(prompt: Any) -> str:
    if prompt is None:
        return "None"
    return f"an object of type {type(prompt).__name__}" if prompt else f"an empty {type(prompt).__name__}"


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _stream(engine: TextEngine, jobs: list[GenerationJob], answers: list[TextAnswer], single: bool) -> Iterator[Any]:
    for piece in engine.pieces(jobs, answers):
        text = "".join(delta.text for delta in piece.deltas if delta.kind == "content")
        if text:
            yield text if single else (piece.number, text)


def _result(answer: TextAnswer, logprobs: bool) -> Generation:
    ids = [token.id for token in answer.tokens]
    values = [token.logprob or 0.0 for token in answer.tokens] if logprobs else None
    return Generation(answer.text, ids, answer.finish, len(answer.prompt), answer.reasoning, list(answer.calls), values)
