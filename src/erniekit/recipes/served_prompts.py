"""A prompt as a server will send it, and as training begins it: the doctor compares the two. Called by the stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from erniekit.config import RunConfig
from erniekit.data.formats import read
from erniekit.data.formats.columns import as_columns
from erniekit.data.template import TemplateRefused, prompt_ids, turns, variables_for
from erniekit.data.thinking import Thinking, kept
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import Conversation
from erniekit.recipes.datasets import TrainData

Compared = tuple[list[int], list[int]]  # served, trained


def first_prompts(cfg: RunConfig, data: TrainData, tokenizer: Tokenizer) -> Compared | None:
    """Of the first conversation that can be compared; None: there is none."""
    return next(filter(None, (_prompts(cfg, row, tokenizer) for row in conversations(cfg, data))), None)


def _prompts(cfg: RunConfig, row: Conversation, tokenizer: Tokenizer) -> Compared | None:
    """The prompt a server gets for the first turn, and what training begins that turn with; None for a row that
    the template refuses: it gives no sample."""
    row = replace(row, messages=kept(row.messages, cast(Thinking, cfg.data.train_thinking)))
    try:
        trained = turns(row, tokenizer)
    except TemplateRefused:
        return None
    answers = [k for k, m in enumerate(row.messages) if m.role == "assistant"]
    if len(trained) < len(answers):  # all before the last trained answer is its prompt
        answers = [k for k in answers if row.messages[k].trained][-1:] or answers[-1:]
    served = prompt_ids(row.messages[: answers[0]], tokenizer, row.tools, variables=variables_for(row))
    return list(served), list(trained[0].query_ids)


def conversations(cfg: RunConfig, data: TrainData) -> Iterator[Conversation]:
    columns = as_columns(cfg.data.columns, cfg.origin("columns"))
    for source in data.sources:
        for _, row in read(source.path, source.report.format, cfg.compat.erniekit_rows, columns):
            if isinstance(row, Conversation) and any(m.role == "assistant" for m in row.messages):
                yield row
