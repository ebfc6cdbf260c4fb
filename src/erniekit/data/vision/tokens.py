"""A row with its media -> a sample: ids, labels, modality, positions, grids; and a prompt for serving.

Called by the vision job; servers call `prompt`. A row that is too long loses whole turns, never a part of a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from erniekit.data.assemble import Assembled, Dropped
from erniekit.data.thinking import Thinking, kept
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Sample, SampleMedia
from erniekit.data.vision.layout import HeaderOf, SeenMedium, seen, tokens_of
from erniekit.data.vision.positions import modality_of, positions_of
from erniekit.data.vision.rules import VisionRules, VisionTokens
from erniekit.data.vision.squeeze import squeezed
from erniekit.data.vision.template import Piece, VisionRenderer
from erniekit.data.vision.vision_row import VisionRow


@dataclass(frozen=True)
class VisionPrompt:
    ids: np.ndarray  # int32 [n]
    media: SampleMedia
    next_position: int  # of the first token that is generated, in all three dimensions


@dataclass(frozen=True)
class Encoded:
    ids: list[int]
    labels: list[int]
    media: list[int]  # in the order of their placeholders
    answers: int


class VisionAssembler:
    """Rows of one dataset, or requests to one server."""

    def __init__(self, tokenizer: Tokenizer, rules: VisionRules, thinking: Thinking = "all") -> None:
        self.tokenizer, self.rules, self.thinking = tokenizer, rules, thinking
        self.tokens = VisionTokens.of(tokenizer)

    def sample(self, row: VisionRow, max_seq_len: int, overlong: str, header_of: HeaderOf) -> Assembled | Dropped:
        """MediaError where a header cannot be read or a picture cannot be sized."""
        rules = self.rules
        messages = kept(row.messages, self.thinking)
        media = seen(row.media, rules, header_of)
        if rules.squeeze:
            media = self._squeezed(messages, row, media, max_seq_len)
        made = self._encoded(messages, row, media)
        if rules.compat:
            found = self._cut_like_erniekit(made, media, max_seq_len)
            return found if isinstance(found, Dropped) else self._finished(found, media, made.answers - found.answers)
        turns = _turns(messages)
        dropped = 0
        while len(made.ids) - 1 > max_seq_len and dropped + 1 < len(turns):
            dropped += 1
            made = self._encoded(_without_first(messages, turns, dropped), row, media)
        cut = 0
        if len(made.ids) - 1 > max_seq_len and overlong == "truncate":
            made, cut = _cut_answer(made, max_seq_len)
        if len(made.ids) - 1 > max_seq_len:
            pictures = sum(tokens_of(media[i].medium, rules) for i in made.media)
            return Dropped(
                "overlong",
                f"the last turn alone has {len(made.ids):,} tokens, {pictures:,} of them of pictures; "
                f"max_seq_len is {max_seq_len:,}",
            )
        return self._finished(made, media, dropped, cut)

    def length(self, row: VisionRow, header_of: HeaderOf) -> int:
        """Tokens of the whole row, whatever would be cut."""
        media = seen(row.media, self.rules, header_of)
        return len(self._encoded(kept(row.messages, self.thinking), row, media).ids) - 1

    def prompt(self, row: VisionRow, header_of: HeaderOf, thinking: bool | None = None) -> VisionPrompt:
        """`row.messages` end with the user's turn."""
        media = seen(row.media, self.rules, header_of)
        made = self._encode(self._renderer(row, media).prompt(row.messages, thinking), media)
        ids = np.array(made.ids, np.int32)
        chosen, next_position = self._media(ids, made, media)
        return VisionPrompt(ids, chosen, next_position)

    def _renderer(self, row: VisionRow, media: Sequence[SeenMedium]) -> VisionRenderer:
        rules = self.rules
        videos = [one.video for one in media]
        more = row.all_trained, row.prefix, row.reasoning if rules.compat else None, self.thinking == "mask"
        return VisionRenderer(rules.template, self.tokenizer, videos, rules.use_pic_id, *more)

    def _encoded(self, messages: Sequence[ChatMessage], row: VisionRow, media: Sequence[SeenMedium]) -> Encoded:
        return self._encode(self._renderer(row, media).sample(messages), media)

    def _encode(self, pieces: Sequence[Piece], media: Sequence[SeenMedium]) -> Encoded:
        ids: list[int] = []
        labels: list[int] = []
        for piece, found in zip(*self._pieces_and_ids(pieces)):
            if piece.medium is not None:
                found = found * tokens_of(media[piece.medium].medium, self.rules)
            ids += found
            labels += found if piece.trained else [IGNORE] * len(found)
        end, eos = self.tokenizer.end_id, self.tokenizer.eos_id
        labels = [eos if label == end else label for label in labels]
        shown = [piece.medium for piece in pieces if piece.medium is not None]
        return Encoded(ids, labels, shown, len({piece.answer for piece in pieces} - {-1}))

    def _pieces_and_ids(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[list[int]]]:
        """Default: text is encoded in runs from one control token to the next, cut where what is trained begins, as a
        server encodes a prompt and goes on. ERNIEKit encodes each piece by itself."""
        tokenizer, place = self.tokenizer, self.tokens.placeholder
        if self.rules.compat:
            special = tokenizer.special_ids
            ids = [
                [place] if p.medium is not None else [special[p.text]] if p.control else tokenizer.encode_text(p.text)
                for p in pieces
            ]
            return list(pieces), ids
        groups: list[list[Piece]] = []
        for piece in pieces:
            joins = groups and piece.medium is None and groups[-1][-1].medium is None
            if joins and (piece.trained, piece.answer) == (groups[-1][-1].trained, groups[-1][-1].answer):
                groups[-1].append(piece)
            else:
                groups.append([piece])
        spans = (
            [("<|IMAGE_PLACEHOLDER|>", True) if p.medium is not None else (p.text, p.control) for p in g]
            for g in groups
        )
        return [group[0] for group in groups], list(tokenizer.encode_parts(spans))

    def _squeezed(
        self, messages: Sequence[ChatMessage], row: VisionRow, media: list[SeenMedium], max_seq_len: int
    ) -> list[SeenMedium]:
        made = self._encoded(messages, row, media)
        other = len(made.ids) - sum(tokens_of(media[i].medium, self.rules) for i in made.media if media[i].video)
        return squeezed(media, max_seq_len - other - 1, self.rules)

    def _cut_like_erniekit(self, made: Encoded, media: Sequence[SeenMedium], limit: int) -> Encoded | Dropped:
        """What fits, up to the last end of an answer: later turns are lost, not earlier ones."""
        if len(made.ids) <= limit:
            return made
        ends = [i for i, id in enumerate(made.ids[:limit]) if id == self.tokenizer.end_id]
        if not ends:
            return Dropped("overlong", f"the first turn has more than max_seq_len={limit:,} tokens")
        length = ends[-1] + 1
        left, shown = made.ids[:length].count(self.tokens.placeholder), []
        for number in made.media:
            if left <= 0:
                break
            left -= tokens_of(media[number].medium, self.rules)
            shown.append(number)
        return Encoded(made.ids[:length], made.labels[:length], shown, len(ends))

    def _media(self, ids: np.ndarray, made: Encoded, media: Sequence[SeenMedium]) -> tuple[SampleMedia, int]:
        rules, shown = self.rules, [media[i].medium for i in made.media]
        grids = [medium.grid for medium in shown]
        counts = [tokens_of(medium, rules) for medium in shown]
        modality = modality_of(ids, [medium.video for medium in shown], counts, self.tokens)
        places, after = positions_of(ids, grids, self.tokens, rules.merge, rules.temporal, rules.positions)
        return SampleMedia(modality, places, np.array(grids, np.int32).reshape(-1, 3), tuple(shown)), after

    def _finished(self, made: Encoded, media: Sequence[SeenMedium], dropped: int, cut: int = 0) -> Assembled | Dropped:
        ids, labels = np.array(made.ids, np.int32)[:-1], np.array(made.labels, np.int32)[1:]
        if self.rules.drop_untrained and not (labels != IGNORE).any():
            return Dropped("untrained", "no answer of the row is trained")
        chosen, _ = self._media(ids, made, media)
        return Assembled(Sample(ids, labels, media=chosen), dropped, cut)


def _turns(messages: Sequence[ChatMessage]) -> list[int]:
    """Where each question begins."""
    return [i for i, message in enumerate(messages) if message.role == "user"]


def _without_first(messages: Sequence[ChatMessage], turns: Sequence[int], count: int) -> tuple[ChatMessage, ...]:
    system = messages[:1] if messages[0].role == "system" else ()
    return (*system, *messages[turns[count] :])


def _cut_answer(made: Encoded, limit: int) -> tuple[Encoded, int]:
    """The end of the last answer off, if some of it stays."""
    over = len(made.ids) - 1 - limit
    first = next((i for i in range(len(made.labels) - 1, -1, -1) if made.labels[i] == IGNORE), -1) + 1
    if len(made.ids) - over <= first + 1:
        return made, 0
    return replace(made, ids=made.ids[:-over], labels=made.labels[:-over]), over
