"""The tokenizer that `erniekit.load` gives: ours, called as a Hugging Face tokenizer is.

Used by api/model.py. The ids are those of training: what is written here is read by the same code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from erniekit.data.compiled_template import BUILT_IN
from erniekit.data.template import prompt_ids, prompt_text
from erniekit.data.tokenizer import BEGIN, Tokenizer, load_tokenizer
from erniekit.errors import ConfigError, DataError
from erniekit.registry import nearest


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` by name, as items and as attributes; `.to(device)` where they are tensors."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        """The same on another device, for `model(**encoding.to("cuda"))`."""
        return Encoding({name: value.to(device) if hasattr(value, "to") else value for name, value in self.items()})


class TextTokenizer(Tokenizer):
    """A model's tokenizer. `tokenizer(text)` gives `input_ids` and `attention_mask`, `apply_chat_template(messages)`
    the ids or the text of a conversation, `decode(ids)` the text.

    Control strings inside a text stay text (as with Hugging Face's `split_special_tokens=True`): only the chat template
    writes control tokens.
    """

    @classmethod
    def over(cls, tokenizer: Tokenizer) -> TextTokenizer:
        """The same tokenizer with these methods."""
        out = cls.__new__(cls)
        out.__dict__.update(tokenizer.__dict__)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (str(self.folder.absolute()), self._rows)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: str = "right",
        return_tensors: str | None = None,
    ) -> Encoding:
        """Ids of one text, or of each of several.

        add_special_tokens: the token that opens a text of this model, if it has one
        padding: True to the longest, "max_length" to max_length
        truncation: cut at max_length
        return_tensors: "pt" or "np"; lists when not given
        """
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        for number, one in enumerate(texts):
            if not isinstance(one, str):
                raise DataError(
                    f"text {number + 1} of {len(texts)} is {type(one).__name__}, not text",
                    where="tokenizer",
                    fix="give a string or a list of strings; apply_chat_template takes messages",
                )
        opening = self.opening_ids if add_special_tokens else []
        rows = [[*opening, *self.encode_text(one)] for one in texts]
        if truncation:
            rows = [row[: _given(max_length)] for row in rows]
        return self._padded(rows, single, padding, max_length, padding_side, return_tensors)

    @property
    def opening_ids(self) -> list[int]:
        """The ids that begin a text that is no conversation: ERNIE's sentence token belongs to its chat form only."""
        return [] if self.begin_id is None or self.begin_token == BEGIN else [self.begin_id]

    @property
    def eos_token(self) -> str:
        return self.named_tokens["eos_token"]

    @property
    def eos_token_id(self) -> int:
        return self.eos_id

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def pad_token_id(self) -> int:
        return self.pad_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of one text."""
        ids: list[int] = self(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, skip_special_tokens: bool | None = None) -> str:
        """The text of ids; a tensor's values count. skip_special_tokens: skip_special under Hugging Face's name."""
        wanted = skip_special if skip_special_tokens is None else skip_special_tokens
        listed = ids.tolist() if hasattr(ids, "tolist") else ids
        return super().decode(listed if isinstance(listed, Iterable) else [listed], wanted)

    def batch_decode(self, rows: Iterable[Iterable[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each row."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """One readable string an id."""
        return self.pieces(ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        padding: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation (or several) in the model's chat form: ids, or text with tokenize=False.

        add_generation_prompt: the ids are those a server generates from and those training begins an answer with
        tools: functions the model may call
        variables: what else the template reads, such as enable_thinking
        return_dict: an Encoding with the attention mask
        """
        self.check_variables(variables, tools, type(self).apply_chat_template)
        single = bool(conversation) and isinstance(conversation[0], Mapping)
        chats: list[Any] = [conversation] if single else list(conversation)
        for messages in chats:
            check_messages(messages)
        texts = [prompt_text(messages, self, add_generation_prompt, tools, variables) for messages in chats]
        if not tokenize:
            return texts[0] if single else texts
        rows = [
            prompt_ids(messages, self, tools, variables=variables, add_generation_prompt=add_generation_prompt)
            for messages in chats
        ]
        made = self._padded(rows, single, padding, None, "left" if add_generation_prompt else "right", return_tensors)
        return made if return_dict else made["input_ids"]

    def check_variables(self, variables: Mapping[str, Any], tools: Any, function: Any) -> None:
        """Refuses what the chat template does not read: a mistyped setting would do nothing. function: the one whose
        settings they may have been meant for."""
        template = (self.tool_template if tools else None) or self.chat_template or BUILT_IN
        known = [name for name in inspect.signature(function).parameters if name not in ("self", "variables")]
        for name in variables:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                near = nearest(name, known)
                raise ConfigError(
                    f"{name!r} is neither a setting here nor read by this model's chat template",
                    where=function.__name__,
                    fix=f"did you mean {near[0]}?" if near else "settings: " + ", ".join(known),
                )

    def _padded(
        self,
        rows: list[list[int]],
        single: bool,
        padding: bool | str,
        max_length: int | None,
        side: str,
        tensors: str | None,
    ) -> Encoding:
        if padding not in (True, False, "longest", "max_length", "do_not_pad") or side not in ("left", "right"):
            raise ConfigError(
                f"padding={padding!r} with padding_side={side!r} is not known",
                where="tokenizer",
                fix='padding: True, False, "longest" or "max_length"; padding_side: "left" or "right"',
            )
        length = _given(max_length) if padding == "max_length" else max(map(len, rows), default=0)
        masks = [[1] * len(row) for row in rows]
        if padding not in (False, "do_not_pad"):
            rows = [_fill(row, length, self.pad_id, side) for row in rows]
            masks = [_fill(row, length, 0, side) for row in masks]
        if tensors is None:
            return Encoding(input_ids=rows[0] if single else rows, attention_mask=masks[0] if single else masks)
        if len({len(row) for row in rows}) > 1:
            raise ConfigError(
                "texts of different lengths do not fit into one tensor", where="return_tensors", fix="padding=True"
            )
        return Encoding(input_ids=_tensor(rows, tensors), attention_mask=_tensor(masks, tensors))


def _opened(folder: str, rows: int | None) -> TextTokenizer:
    return TextTokenizer.over(load_tokenizer(folder, rows))


_ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages: Any) -> None:
    """Chat templates skip a role they do not know and an absent content: the model would answer less than was
    asked."""
    for number, message in enumerate(messages if isinstance(messages, Sequence) else [messages]):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            what = "a message is not a mapping with role and content"
        elif message["role"] not in _ROLES:
            what = f"the role of a message is {message['role'][:40]!r}; expected {', '.join(_ROLES)}"
        elif content is None and not message.get("tool_calls"):
            what = "a message has no content"
        elif content is not None and not isinstance(content, str):
            what = f"the content of a message is {type(content).__name__}, not text"
        else:
            continue
        raise DataError(
            what,
            where=f"message {number + 1}",
            fix='write {"role": "user", "content": "..."}; pictures are for erniekit chat and erniekit server',
        )


def _given(max_length: int | None) -> int:
    if max_length is None or max_length < 1:
        raise ConfigError(f"max_length is {max_length}", where="tokenizer", fix="give a whole number, 1 or more")
    return max_length


def _fill(row: list[int], length: int, value: int, side: str) -> list[int]:
    more = [value] * (length - len(row))
    return [*more, *row] if side == "left" else [*row, *more]


def _tensor(rows: list[list[int]], kind: str) -> Any:
    if kind == "pt":
        import torch

        return torch.tensor(rows, dtype=torch.int64)
    if kind == "np":
        import numpy as np

        return np.array(rows, dtype=np.int64)
    raise ConfigError(f"return_tensors={kind!r} is not known", where="tokenizer", fix='"pt", "np", or leave it out')
