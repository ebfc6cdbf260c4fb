"""Messages and media to pieces of text and control tokens, each with whether it is trained: for samples and prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from erniekit.data.formats.fields import BadRow
from erniekit.data.thinking import THINK, THOUGHT, divided, write_out
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage
from erniekit.data.vision.rules import VisionTemplate
from erniekit.data.vision.vision_row import BOUND, UNTRAINED, parts

EMPTY = f"{THINK}\n\n{THOUGHT}\n\n"


@dataclass(frozen=True)
class Piece:
    text: str = ""
    control: bool = False  # a token of the template, not text
    trained: bool = False
    medium: int | None = None  # its placeholders stand here
    answer: int = -1  # of an answer: which one


class VisionRenderer:
    """One conversation. `all_trained` overrides the template's choice of trained answers, without empty thoughts;
    `prefix` is the empty thought before the last answer, the only one trained then."""

    def __init__(
        self,
        template: VisionTemplate,
        tokenizer: Tokenizer,
        videos: Sequence[bool],
        use_pic_id: bool = True,
        all_trained: bool = False,
        prefix: str = "",
        reasoning: bool | None = None,
        mask_thoughts: bool = False,
    ) -> None:
        self.template, self.tokenizer, self.videos = template, tokenizer, videos
        self.use_pic_id, self.all_trained, self.prefix = use_pic_id, all_trained, prefix
        self.reasoning, self.mask_thoughts = reasoning, mask_thoughts
        self._pictures = self._clips = 0

    def sample(self, messages: Sequence[ChatMessage]) -> list[Piece]:
        self._pictures = self._clips = 0
        messages = tuple(map(write_out, messages))
        if self.template.drop_thoughts:
            messages = tuple(_without_thought(m) for m in messages)
        answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
        thinking = self.reasoning
        if thinking is None:
            thinking = any(map(_tagged, (messages[i] for i in answers)))
        out = [self._control(self.tokenizer.begin_token)]
        for i, message in enumerate(messages):
            if message.role == "assistant":
                out += self._answer(message, i, i == answers[-1], thinking)
            else:
                out += self._prompt_pieces(message)
        return out

    def prompt(self, messages: Sequence[ChatMessage], thinking: bool | None = None) -> list[Piece]:
        """A server's prompt: earlier answers as they are, then the turn of the assistant. thinking: it may think
        first; otherwise an empty thought is put into its mouth, as in training."""
        self._pictures = self._clips = 0
        out = [self._control(self.tokenizer.begin_token)]
        for i, message in enumerate(map(write_out, messages)):
            if message.role == "assistant":
                if self.template.block == "every" and not _tagged(message):
                    out.append(self._block(i))
                texts = [text.removeprefix(UNTRAINED) for text in message.content.split(BOUND)]
                out += [Piece(text, answer=i) for text in texts if text]
                out.append(Piece(self.tokenizer.end_token, control=True, answer=i))
            else:
                out += self._prompt_pieces(message)
        return out if thinking or self.template.block == "none" else [*out, self._block(len(messages))]

    def _prompt_pieces(self, message: ChatMessage) -> Iterator[Piece]:
        if message.role == "system":
            yield from self._content(message)
            yield Piece("\n")
            return
        yield Piece("User: ")
        yield from self._content(message)
        yield Piece("\nAssistant: ")

    def _content(self, message: ChatMessage) -> Iterator[Piece]:
        for part in parts(message.content):
            if isinstance(part, str):
                yield from (Piece(text) for text in part.split(BOUND) if text)
                continue
            if part >= len(self.videos):
                raise BadRow("length_mismatch", f"medium {part} of {len(self.videos)}")
            video = self.videos[part]
            if video:
                self._clips += 1
                yield Piece(f"Video {self._clips}:")
            elif self.use_pic_id:
                self._pictures += 1
                yield Piece(f"Picture {self._pictures}:")
            kind = "VIDEO" if video else "IMAGE"
            yield self._control(f"<|{kind}_START|>")
            yield Piece(medium=part)
            yield self._control(f"<|{kind}_END|>")

    def _answer(self, message: ChatMessage, place: int, last: bool, thinking: bool) -> Iterator[Piece]:
        rules = self.template
        trained = message.trained and (last or not self.prefix)
        blocks = rules.block == "every" and not _tagged(message)
        if rules.block == "last" and not self.all_trained and not thinking:
            blocks = last
            trained = trained and (last or rules.train == "all")
        elif rules.train == "last" and not self.all_trained and not thinking:
            trained = trained and last
        if self.prefix and last:
            yield Piece(self.prefix, answer=place)
        elif blocks:
            yield self._block(place, trained and rules.block_trained)
        is_trained = trained
        for text in message.content.split(BOUND):
            is_trained = trained and not text.startswith(UNTRAINED)
            thought, bare = self._divided(text.removeprefix(UNTRAINED))
            if thought:
                yield Piece(thought, answer=place)
            if bare:
                yield Piece(bare, trained=is_trained, answer=place)
        yield Piece(
            self.tokenizer.end_token, control=True, trained=is_trained and (last or rules.train_ends), answer=place
        )

    def _divided(self, text: str) -> tuple[str, str]:
        """A thought that is read and not trained, and the rest."""
        if not self.mask_thoughts or not text.lstrip().startswith(THINK) or THOUGHT not in text:
            return "", text
        end = text.index(THOUGHT) + len(THOUGHT)
        return text[:end], text[end:]

    def _block(self, place: int, trained: bool = False) -> Piece:
        return Piece(f"\n{EMPTY}" if self.template.newline else EMPTY, trained=trained, answer=place)

    def _control(self, token: str) -> Piece:
        return Piece(token, control=True)


def _tagged(message: ChatMessage) -> bool:
    return THINK in message.content and THOUGHT in message.content


def _without_thought(message: ChatMessage) -> ChatMessage:
    if message.role != "assistant":
        return message
    _, answer = divided(message.content)
    return ChatMessage(message.role, answer, message.trained)
