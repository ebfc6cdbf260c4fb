"""The rows of a file as a training stage reads them: conversations, pairs, judged answers, classes or documents.

Called by `erniekit data` and `erniekit data clean`, which look at rows and train nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.assemble import Assembled
from erniekit.data.classification import ClassifyJob, classes_in
from erniekit.data.formats import Detected, Raw, check_columns, detect
from erniekit.data.formats.columns import Columns
from erniekit.data.formats.files import decode
from erniekit.data.preference import PairRules
from erniekit.data.template import Turn
from erniekit.data.text_job import UNUSABLE, TextJob, problem_of
from erniekit.data.text_rows import Place, documents
from erniekit.data.token_cache import not_pairs
from erniekit.data.tokenise import TokeniseJob, whole_rows
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage, RowContent, RowProblem, Sample
from erniekit.data.unpaired_source import UnpairedJob
from erniekit.errors import DataError

STAGES = ("SFT", "DPO", "RM", "KTO", "CLS", "PT")
_NO_LIMIT = 1 << 30  # tokens
_LOOK_AT = 50  # rows


@dataclass(frozen=True)
class StageRows:
    format: str
    why: str
    noun: str  # of what a row becomes
    job: TokeniseJob
    vision: bool = False

    @property
    def preference(self) -> bool:
        return self.noun == "preference pair"

    def read(self, raw: Raw, line: int) -> Sequence[Any] | RowProblem:
        return self.job.read(raw, line)

    def rows(self) -> Iterator[tuple[int, Raw]]:
        if isinstance(self.job, DocumentJob) and _is_plain(self.job.path):
            return ((found.row, found.raw) for found in documents(Path(self.job.path), Place()))
        return whole_rows(self.job.path)


def stage_rows(
    path: str,
    stage: str | None = None,
    type: str | None = None,
    columns: Columns = (),
    tokenizer: Tokenizer | None = None,
    vision: bool = False,
) -> StageRows:
    """stage: by the fields of the first rows where it is not given. type: a format; detected where it is not given."""
    stage = stage or _by_fields(path, type, columns, vision)
    rules = PairRules(_NO_LIMIT)
    # Without a tokenizer a job reads rows and assembles none.
    common: dict[str, Any] = dict(
        tokenizer=tokenizer, max_seq_len=_NO_LIMIT, overlong="drop", compat=False, columns=columns
    )
    if columns and (type or stage in ("KTO", "CLS")):
        check_columns(path, columns)
    if stage == "PT":
        return StageRows("text", "for `stage: PT`", "document", DocumentJob(path, "text", **common))
    if stage == "CLS":
        job = ClassifyJob(path, "classes", classes=classes_in([path], columns), **common)
        return StageRows("classes", "rows have `text` and `label`: for `stage: CLS`", "text", job)
    if stage == "KTO":
        judged = UnpairedJob(path, "unpaired", pairs=rules, **common)
        return StageRows("unpaired", "for `stage: KTO`", "judged answer", judged)
    found = detect(path, vision, columns) if type is None else _as_given(path, type, columns)
    if stage in ("DPO", "RM") and not found.preference:
        raise not_pairs(path, found.why, "a reward model" if stage == "RM" else "DPO")
    read = TokeniseJob(path, found.format, pairs=rules if found.preference else None, **common)
    noun = "preference pair" if found.preference else "conversation"
    return StageRows(found.format, found.why, noun, read, bool(found.vision))


def _by_fields(path: str, type: str | None, columns: Columns, vision: bool) -> str:
    """Of files that no reader of conversations or pairs takes: CLS, PT, or SFT, whose error then names the fields."""
    if type is not None:
        return "SFT"
    if _is_plain(path):
        return "PT"
    try:
        detect(path, vision, columns)
    except DataError:
        seen = [row for row in _first(path, columns) if isinstance(row, dict) and isinstance(row.get("text"), str)]
        if seen:
            return "CLS" if all(row.get("label") is not None for row in seen) else "PT"
    return "SFT"


def _is_plain(path: str) -> bool:
    return path.lower().removesuffix(".gz").endswith(".txt")


def _first(path: str, columns: Columns) -> Iterator[Any]:
    for _, raw in islice(whole_rows(path), _LOOK_AT):
        if isinstance(raw, RowProblem):
            continue
        try:
            yield decode(raw, columns)
        except (ValueError, RecursionError):
            continue


def _as_given(path: str, type: str, columns: Columns) -> Detected:
    try:
        found = detect(path, vision=True, columns=columns)
    except DataError:
        return Detected(type, "as given")
    return Detected(type, "as given", found.preference, found.vision)


@dataclass(frozen=True)
class Document:
    text: str
    unused: tuple[str, ...] = ()

    def contents(self) -> RowContent:
        return RowContent(((ChatMessage("user", self.text),),))


@dataclass(frozen=True)
class DocumentJob(TokeniseJob):
    def read(self, raw: Any, line: int) -> Sequence[Document] | RowProblem:
        try:
            if isinstance(raw, RowProblem):
                return raw
            return [Document("\n".join(TextJob(self.tokenizer).texts(raw)))]
        except UNUSABLE as error:
            return RowProblem(self.path, line, *problem_of(error))

    def assemble(self, said: Document, known: list[Turn] | None = None) -> Assembled:
        ids = np.array(self.tokenizer.encode_text(said.text), np.int32)
        return Assembled(Sample(ids, ids))
