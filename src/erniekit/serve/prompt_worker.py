"""Prompt ids of one request, and a process that makes them for long prompts. Used by prompt_work.py.

The process reads work from its standard input and writes results to its standard output, one after another. It imports
neither torch nor the server, ends when its input does, and is killed by the system when a piece of work takes too long,
even if its server is gone by then.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its neighbours must not pass for packages

import os
import pickle
import signal
import struct
from dataclasses import dataclass
from typing import IO, Any

from erniekit.data.formats.fields import BadRow
from erniekit.data.media.decode import MediaHeader
from erniekit.data.media.limits import MediaError
from erniekit.data.template import PromptTooLong, RenderedTooLong, TemplateRefused, prompt_ids
from erniekit.data.template_limit import deadline
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.vision.layout import seen, tokens_of
from erniekit.data.vision.rules import VisionRules
from erniekit.data.vision.tokens import VisionAssembler, VisionPrompt
from erniekit.data.vision.vision_row import GivenMedium, VisionRow
from erniekit.errors import CheckpointError

HEADER = struct.Struct("<Q")
TEXT_FAULTS = (UnicodeEncodeError, RecursionError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class ChatPrompt:
    """Messages to render with the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


@dataclass(frozen=True)
class TextPrompts:
    """Texts to encode as they are; `opening` is the id that each begins with."""

    texts: list[str]
    opening: int | None


@dataclass(frozen=True)
class SeenChat:
    """Messages for a vision-language model: the bytes of media are elsewhere, their headers are known."""

    row: VisionRow
    headers: dict[str, MediaHeader]  # by the path of a source
    rules: VisionRules
    thinking: bool | None

    @property
    def characters(self) -> int:
        return sum(len(message.content) + len(message.thought) for message in self.row.messages)

    def header(self, given: GivenMedium, index: int) -> MediaHeader:
        return self.headers[given.sources[index].path]


@dataclass(frozen=True)
class PromptTask:
    what: ChatPrompt | TextPrompts | SeenChat
    most: int  # tokens that a prompt may have
    render_s: float  # processor time for the chat template


@dataclass(frozen=True)
class Failed:
    """kind: refused, too long, beyond (an id without a row), no text, media (they cannot be used), unable (they cannot
    be read here), slow, changed, stopping, fault."""

    kind: str
    message: str
    tokens: int = 0
    code: str = ""  # of media: what MediaError and BadRow call their kind
    where: str = ""  # of media: the place in the request, if it is known


@dataclass(frozen=True)
class TokenizerSource:
    """Which tokenizer: as it was loaded by the server."""

    folder: str
    rows: int | None
    fingerprint: str
    chat_template: str | None
    tool_template: str | None
    widest: int | None  # takes a while to find for a large vocabulary

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerSource:
        _, (folder, rows) = tokenizer.__reduce__()
        templates = tokenizer.chat_template, tokenizer.tool_template
        return cls(folder, rows, tokenizer.fingerprint, *templates, tokenizer.widest)

    def load(self) -> Tokenizer | None:
        """None where the files are no longer those that the server has read."""
        try:
            tokenizer = load_tokenizer(self.folder, self.rows)
        except (CheckpointError, OSError):
            return None
        if tokenizer.fingerprint != self.fingerprint:
            return None
        tokenizer.chat_template, tokenizer.tool_template = self.chat_template, self.tool_template
        tokenizer.widest = self.widest
        return tokenizer


def prepare(work: PromptTask, tokenizer: Tokenizer) -> list[list[int]] | list[VisionPrompt] | Failed:
    """The ids of each prompt of a request, or why there are none."""
    try:
        with deadline(work.render_s):
            if isinstance(work.what, TextPrompts):
                return _encode(work.what, tokenizer, work.most)
            if isinstance(work.what, SeenChat):
                return [_assemble(work.what, tokenizer, work.most)]
            chat = work.what
            ids = prompt_ids(chat.messages, tokenizer, chat.tools, variables=chat.variables, most=work.most)
            return [ids]
    except TemplateRefused as refused:
        return Failed("refused", str(refused))
    except BadRow as bad:
        return Failed("refused", bad.reason)
    except MediaError as bad:
        return Failed("media", bad.reason, code=bad.kind)
    except PromptTooLong as long:
        return Failed("too long", str(long), long.tokens)
    except RenderedTooLong as slow:
        return Failed("slow", f"{slow.what}; {slow.where}")
    except CheckpointError as beyond:
        return Failed("beyond", beyond.what)
    except TEXT_FAULTS as error:
        return Failed("no text", f"{type(error).__name__}: {error}"[:200])
    except Exception as error:
        return Failed("fault", f"{type(error).__name__}: {error}"[:400])


def _encode(work: TextPrompts, tokenizer: Tokenizer, most: int) -> list[list[int]]:
    out = []
    for text in work.texts:
        least = tokenizer.least_tokens(len(text))
        if least > most:
            raise PromptTooLong(least)
        ids = [*([] if work.opening is None else [work.opening]), *tokenizer.encode_text(text)]
        if len(ids) > most:
            raise PromptTooLong(len(ids))
        out.append(ids)
    return out


def _assemble(work: SeenChat, tokenizer: Tokenizer, most: int) -> VisionPrompt:
    pictures = sum(tokens_of(one.medium, work.rules) for one in seen(work.row.media, work.rules, work.header))
    least = pictures + tokenizer.least_tokens(work.characters)
    if least > most:
        raise PromptTooLong(least)
    made = VisionAssembler(tokenizer, work.rules).prompt(work.row, work.header, work.thinking)
    if len(made.ids) > most:
        raise PromptTooLong(len(made.ids))
    return made


def send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    pipe.write(HEADER.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """EOFError when the other side is gone."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(head)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between two results
    tokenizers: dict[TokenizerSource, Tokenizer] = {}
    while True:
        try:
            source, work, seconds = receive(sys.stdin.buffer)
        except EOFError:
            return
        # The default action of this signal ends the process; no interpreter lock is needed for it.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        tokenizer = tokenizers.get(source) or source.load()
        if tokenizer is None:
            out: Any = Failed("changed", f"the tokenizer in {source.folder} is not the one the server has loaded")
        else:
            tokenizers[source] = tokenizer
            out = prepare(work, tokenizer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(results, out)


if __name__ == "__main__":
    # Pickle names classes by their module: both sides must mean the same one.
    from erniekit.serve import prompt_worker

    prompt_worker.main()
