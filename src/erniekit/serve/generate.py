"""Text from a model in this process, piece by piece: transformers' generation loop on our weights.

Used by recipes/tasks.py, for the answers of evaluation tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from erniekit.checkpoint.transformers_bridge import to_transformers
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.lora.merge import fold
from erniekit.serve.detokenizer import Detokenizer
from erniekit.serve.engines.base import GREEDY_TEMPERATURE, GREEDY_TOP_P


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 0.95  # 0 always takes the likeliest token
    top_p: float = 0.7
    top_k: int = 0  # 0: no limit
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_model_len: int = 2048  # prompt and answer together, in tokens

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_p < GREEDY_TOP_P


@dataclass(frozen=True)
class GeneratedText:
    ids: list[int]  # as generated, the stop token apart
    text: str
    stopped: str  # stop: the model ended it; length: a limit did; interrupt: the person did


class Generator:
    """Folds adapters into the model it is given: the answers are those of the merged export."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, stop_ids: Sequence[int] = ()) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        config: Any = model.config
        self.tokenizer, self.max_positions, self.vocab_size = tokenizer, config.max_positions, config.vocab_size
        self.stop_ids = sorted({tokenizer.eos_id, tokenizer.end_id, *stop_ids})
        self.hf_model: Any = to_transformers(fold(model).eval(), config)

    @torch.no_grad()
    def answer(
        self, prompt: Sequence[int], sampling: Sampling, on_text: Callable[[str], None] = lambda text: None
    ) -> GeneratedText:
        """Whole characters go to `on_text` as they come. Ctrl-C ends the answer and keeps the text so far."""
        from transformers import GenerationConfig, LogitsProcessorList

        available = min(sampling.max_model_len, self.max_positions) - len(prompt)
        if available < 1:
            raise DataError(
                f"the conversation is {len(prompt)} tokens long; {len(prompt) + available} is the limit",
                where="max_model_len" if sampling.max_model_len <= self.max_positions else "the model's positions",
                fix="ask with less text, or raise max_model_len (a model's own positions are its end)",
            )
        limit = min(sampling.max_new_tokens, available)
        chances = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        settings = GenerationConfig(
            max_new_tokens=limit,
            min_new_tokens=min(sampling.min_tokens, limit) or None,
            do_sample=not sampling.greedy,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=self.stop_ids,
            pad_token_id=self.tokenizer.pad_id,
            **({} if sampling.greedy else chances),
        )
        ids = torch.tensor([list(prompt)], device=self.hf_model.device)
        streamer = _TokenStreamer(self.tokenizer, self.stop_ids, on_text)
        stopped = ""
        try:
            self.hf_model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                logits_processor=LogitsProcessorList(self._processors(len(prompt), sampling)),
                streamer=streamer,
            )
        except KeyboardInterrupt:
            stopped = "interrupt"
        streamer.flush()
        return GeneratedText(streamer.ids, streamer.text, stopped or ("stop" if streamer.ended else "length"))

    def _processors(self, prompt_length: int, sampling: Sampling) -> list[Callable[..., torch.Tensor]]:
        out: list[Callable[..., torch.Tensor]] = []
        if self.vocab_size > self.tokenizer.vocab_size:
            out.append(lambda ids, scores: _mask_padding(scores, self.tokenizer.vocab_size))
        if sampling.frequency_penalty or sampling.presence_penalty:
            out.append(lambda ids, scores: _penalise(ids[:, prompt_length:], scores, sampling))
        return out


def _mask_padding(scores: torch.Tensor, known: int) -> torch.Tensor:
    """Embedding rows beyond the tokenizer's are padding to a round size; they spell nothing."""
    scores[:, known:] = -float("inf")
    return scores


def _penalise(generated: torch.Tensor, scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """OpenAI's two penalties: per occurrence of a token, and once for any. generated [1, n], scores [1, V]."""
    counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
    return scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0).to(scores.dtype)


class _TokenStreamer:
    """A streamer as transformers' loop calls it: first the prompt, then one token at a time."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], on_text: Callable[[str], None]) -> None:
        self.detokenizer, self.stop_ids, self.on_text = Detokenizer(tokenizer), frozenset(stop_ids), on_text
        self.text, self.ended = "", False
        self._prompt_seen = False

    @property
    def ids(self) -> list[int]:
        return self.detokenizer.ids

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for id in value.flatten().tolist():
            if id in self.stop_ids:
                self.ended = True
            else:
                self._show(self.detokenizer.add(id))

    def end(self) -> None:
        pass

    def flush(self) -> None:
        self._show(self.detokenizer.rest())

    def _show(self, new: str) -> None:
        if new:
            self.text += new
            self.on_text(new)
