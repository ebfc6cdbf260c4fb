"""Preferences on pictures: a prompt that shows media and two answers to it, as one row of a batch. For stage DPO.

The prompt and its pictures are computed once for both answers; positions of the rejected one go on behind the prompt,
as they would in a sequence of its own. Called by recipes/vision_pairs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.formats import PREFERENCE_FORMATS, detect
from erniekit.data.formats.fields import BadRow, is_preference, require
from erniekit.data.preference import PairRules, PairSample, Preference
from erniekit.data.preference_assemble import Answer, lay_out
from erniekit.data.thinking import Thinking, kept
from erniekit.data.token_cache import PairSource, tokenised
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, ChatMessage, SampleMedia
from erniekit.data.vision.chat_rows import ChatMedia, replace_tags
from erniekit.data.vision.job import VisionJob, VisionSource
from erniekit.data.vision.layout import HeaderOf, SeenMedium, seen
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import Encoded, VisionAssembler
from erniekit.data.vision.vision_row import GivenMedium, VisionRow, mark, media_in
from erniekit.errors import DataError

_MESSAGE_FIELDS = ("messages", "prompt", "chosen", "rejected")
# Fields whose <image> stand for pictures, in whatever format the pair is; and those that hold none.
_PROMPT_FIELDS = ("prompt", "messages", "src", "instruction", "question", "input")
_OTHER = ("chosen", "rejected", "response", "tgt", "system", "history")


@dataclass(frozen=True)
class VisionPair(VisionRow):
    """`messages` are the prompt's."""

    chosen: tuple[ChatMessage, ...] = ()
    rejected: tuple[ChatMessage, ...] = ()
    score_delta: float = 1.0


class PairMedia(ChatMedia):
    """The same picture in both answers' copies of a prompt is one, so that the two prompts stay the same."""

    def _keep(self, medium: GivenMedium) -> str:
        plain = replace(medium, sources=tuple(replace(place, label="") for place in medium.sources))
        for number, known in enumerate(self._plain):
            if known == plain:
                return mark(number)
        self._plain.append(plain)
        return super()._keep(medium)

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self._plain: list[GivenMedium] = []


def read_vision_pair(row: Any, folder: Path, format: str) -> VisionPair:
    """BadRow where it cannot be read. Pairs without pictures are read by the text formats."""
    if not isinstance(row, dict):
        raise BadRow("not_an_object", "a row must be an object with `messages`, `chosen` and `rejected`")
    if not is_preference(row):
        require(row, "chosen", "rejected")
    media, row = PairMedia(folder), dict(row)
    for field in _MESSAGE_FIELDS:
        value = row.get(field)
        if isinstance(value, dict):
            row[field] = _plain(value, field, media)
        elif isinstance(value, list):
            row[field] = [_plain(item, f"{field}[{i}]", media) for i, item in enumerate(value)]
    replace_tags(row, media, _PROMPT_FIELDS, _OTHER)
    if "response" in row:
        format = "erniekit"
    elif any(isinstance(row.get(field), list) for field in ("messages", "prompt", "chosen")):
        format = "messages"
    elif "instruction" in row or "question" in row:
        format = "alpaca"
    read: Preference = PREFERENCE_FORMATS.get(format)(row, False)
    for message in (*read.prompt, *read.chosen, *read.rejected):
        if message.role == "tool" or message.tool_calls or read.tools:
            raise BadRow("tools", "tool calls are not supported in preference rows with pictures")
    for message in (*read.chosen, *read.rejected):
        if media_in(message):
            raise BadRow("media_in_answer", "pictures belong in the prompt, not behind an answer")
    return VisionPair(
        read.prompt, tuple(media.found), read.unused, chosen=read.chosen, rejected=read.rejected,
        score_delta=read.score_delta,
    )  # fmt: skip


def _plain(item: Any, field: str, media: ChatMedia) -> Any:
    return {**item, "content": media.plain(item.get("content"), f"{field}.content")} if isinstance(item, dict) else item


@dataclass(frozen=True)
class _Sequence:
    """The prompt with one answer."""

    ids: list[int]
    scored: list[bool]  # whether this token's log-probability counts
    encoded: Encoded

    def behind(self, prompt: int) -> Answer:
        return Answer(self.ids[prompt:], self.scored[prompt:], [])


class VisionPairAssembler(VisionAssembler):
    """As VisionAssembler. A pair that is too long is dropped: half an answer compares nothing."""

    def __init__(self, tokenizer: Tokenizer, rules: VisionRules, thinking: Thinking, pairs: PairRules) -> None:
        # All turns of an answer are compared; those of the prompt are marked untrained.
        super().__init__(tokenizer, replace(rules, template=replace(rules.template, train="all")), thinking)
        self.pairs = pairs

    def pair(self, row: VisionPair, max_seq_len: int, header_of: HeaderOf) -> Assembled | Dropped:
        media = seen(row.media, self.rules, header_of)
        chosen, rejected = (self._sequence(row, answer, media) for answer in (row.chosen, row.rejected))
        common, longest = _common(chosen, rejected), self.pairs.max_prompt_len
        if not common:
            return Dropped("template", "the chat template renders the prompt as nothing")
        if common > longest:
            return Dropped("overlong", f"its prompt has {common:,} tokens, max_prompt_len is {longest:,}")
        one, other = chosen.behind(common), rejected.behind(common)
        total = common + len(one.ids) + len(other.ids) - 1
        if total > max_seq_len:
            return Dropped("overlong", f"prompt and answers have {total:,} tokens, max_seq_len is {max_seq_len:,}")
        if not any(one.scored) or not any(other.scored):
            return Dropped("untrained", "an answer has nothing to score")
        if one.ids == other.ids:
            return Dropped("same_answers", "both answers are the same")
        sample = lay_out(chosen.ids[:common], one, other, row.score_delta, self.tokenizer, compat=False)
        return Assembled(replace(sample, media=self._both(chosen, rejected, media, sample.shared)))

    def _sequence(self, row: VisionPair, answer: tuple[ChatMessage, ...], media: Sequence[SeenMedium]) -> _Sequence:
        before = tuple(replace(message, trained=False) for message in row.messages)
        after = tuple(replace(message, trained=message.role == "assistant") for message in answer)
        made = self._encoded(kept(before + after, self.thinking), row, media)
        masked = {self.tokenizer.end_id} if self.pairs.mask_out_eos_token else set()
        scored = [label != IGNORE and id not in masked for id, label in zip(made.ids, made.labels)]
        return _Sequence(made.ids, scored, made)

    def _both(self, chosen: _Sequence, rejected: _Sequence, media: Sequence[SeenMedium], shared: int) -> SampleMedia:
        """Each as it would be by itself, less its last token; of the second what is not shared."""
        first, second = (
            self._media(np.array(one.ids[:-1], np.int32), one.encoded, media)[0] for one in (chosen, rejected)
        )
        return replace(
            first,
            modality=np.concatenate((first.modality, second.modality[shared:])),
            positions=np.concatenate((first.positions, second.positions[shared:])),
        )


def _common(one: _Sequence, other: _Sequence) -> int:
    """Tokens that both begin with and that neither is scored for."""
    rows = zip(one.ids, other.ids, one.scored, other.scored)
    return next((i for i, (a, b, *scored) in enumerate(rows) if a != b or any(scored)), 0)


@dataclass(frozen=True)
class VisionPairJob(VisionJob):
    def vision_row(self, row: Any) -> VisionPair:
        return read_vision_pair(row, Path(self.path).absolute().parent, self.format)

    def _sample(self, row: VisionRow) -> Any:
        assert isinstance(row, VisionPair)
        assert self.pairs is not None
        assembler = VisionPairAssembler(self.tokenizer, self.rules, self.thinking, self.pairs)
        return assembler.pair(row, self.max_seq_len, self._header)


class VisionPairSource(VisionSource, PairSource):
    """Preference pairs of one file with their media."""

    def sample(self, index: int) -> PairSample:
        pair = super().sample(index)  # VisionSource's, which adds media to what PairSource has read
        assert isinstance(pair, PairSample)
        return pair


def open_vision_pairs(path: str | Path, format: str | None, job: dict[str, Any], **cache: Any) -> VisionPairSource:
    """job: fields of VisionPairJob besides path and format. cache: as tokenised()'s."""
    found = detect(path, vision=True)
    if not found.preference:
        raise DataError(
            f"these rows hold no preference pairs: {found.why}",
            where=str(path),
            fix="DPO compares two answers: `chosen` and `rejected`; `stage: VL-SFT` learns one",
        )
    made = VisionPairJob(str(path), format or found.format, **job)
    return VisionPairSource(*tokenised(made, **cache))
