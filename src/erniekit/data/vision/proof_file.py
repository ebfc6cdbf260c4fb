"""A checkpoint's proof of preprocessing: a few rows of its run with their pictures, the rules, and the digests of what
each stage made of them. `check` computes them again and names the first stage that differs.

Written by recipes/vision_data.py with every checkpoint; read by export and eval, and by whatever serves the model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from erniekit.data.assemble import Assembled
from erniekit.data.formats.fields import BadRow
from erniekit.data.media.frames import FrameRules
from erniekit.data.media.limits import MediaError, MediaLimits
from erniekit.data.media.place import MediaPlace, read
from erniekit.data.media.worker import MediaPool
from erniekit.data.thinking import Thinking
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import ChatMessage
from erniekit.data.vision.layout import headers_from
from erniekit.data.vision.proof import first_difference, proof_of
from erniekit.data.vision.rules import VisionRules, VisionTemplate
from erniekit.data.vision.tokens import VisionAssembler
from erniekit.data.vision.vision_row import GivenMedium, VisionRow
from erniekit.errors import CheckpointError, DataError
from erniekit.files.json_file import read_object
from erniekit.files.listed import has_file
from erniekit.log import warn
from erniekit.printable import counted

FILE = "vision_proof.json"
ROWS, LOOKED_AT = 2, 64  # rows kept; rows of the data among which they are chosen
MOST_BYTES = 256 << 10  # of the media of a row
# What a model's own folder decides: its tokenizer and sizes. All other stages are this machine's libraries.
OF_FOLDER = ("size", "template", "position")


@dataclass(frozen=True)
class Proved:
    """stage: the first that gave something else than in training; None: all are as they were."""

    rows: int
    stage: str | None = None

    @property
    def of_folder(self) -> bool:
        return self.stage in OF_FOLDER

    def line(self) -> str:
        what = f"{counted(self.rows, 'stored row')} with pictures"
        if self.stage is None:
            return f"{what}: pixels, ids and positions are made as in training"
        return f"{what}: not made as in training, from the stage `{self.stage}` on"


def proof_file(
    rows: Iterable[VisionRow], tokenizer: Tokenizer, rules: VisionRules, thinking: Thinking, max_seq_len: int,
    pool: MediaPool,
) -> bytes | None:  # fmt: skip
    """Of the first rows with a small picture and with a small video; None where none is small."""
    kept: list[dict[str, Any]] = []
    kinds: set[bool] = set()
    for row in islice(rows, LOOKED_AT):
        kind = any(medium.video for medium in row.media)
        if len(kept) == ROWS or not row.media or kind in kinds:
            continue
        try:
            stored = _stored(row, rules.limits)
            if stored is None:
                continue
            stored["proof"] = _proof(_row(stored), tokenizer, rules, thinking, max_seq_len, pool)
        except (MediaError, BadRow):
            continue
        kept.append(stored)
        kinds.add(kind)
    if not kept:
        return None
    settings = {"rules": asdict(rules), "thinking": thinking, "max_seq_len": max_seq_len}
    return json.dumps({"version": 1, **settings, "rows": kept}, ensure_ascii=False, sort_keys=True).encode()


@dataclass(frozen=True)
class StoredProof:
    rules: VisionRules
    thinking: Thinking
    max_seq_len: int
    rows: tuple[VisionRow, ...]
    proofs: tuple[dict[str, str], ...]


def load(folder: Path) -> StoredProof | None:
    """None where the folder has none; a CheckpointError where it cannot be read."""
    if not has_file(folder, FILE):
        return None
    fix = f"move {FILE} away: the model is then used without this check; or copy it again from a checkpoint"
    try:
        written = read_object(folder / FILE, CheckpointError)
        rows = tuple(_row(one) for one in written["rows"])
        proofs = tuple(dict(one["proof"]) for one in written["rows"])
        return StoredProof(_rules(written["rules"]), written["thinking"], int(written["max_seq_len"]), rows, proofs)
    except CheckpointError as error:
        raise CheckpointError(error.what, where=str(folder / FILE), fix=fix) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{FILE} is damaged, or not a proof that erniekit wrote: {str(error)[:200]}"
        raise CheckpointError(what, where=str(folder / FILE), fix=fix) from None


def check(folder: Path, tokenizer: Tokenizer, rules: VisionRules | None = None) -> Proved | None:
    """None where the folder has no proof. rules: other ones than those of training, such as a server's own."""
    stored = load(folder)
    if stored is None:
        return None
    count = len(stored.rows)
    with MediaPool(1, stored.rules.limits) as pool:
        for row, proof in zip(stored.rows, stored.proofs):
            try:
                found = _proof(row, tokenizer, rules or stored.rules, stored.thinking, stored.max_seq_len, pool)
            except (MediaError, BadRow) as error:
                return Proved(count, "decode" if isinstance(error, MediaError) else "template")
            except DataError as error:  # a package that decodes is missing
                warn(f"preprocessing is not compared with training: {error.what}")
                return None
            if (stage := first_difference(proof, found)) is not None:
                return Proved(count, stage)
    return Proved(count)


def trained_rules(folder: Path) -> VisionRules | None:
    """That a checkpoint's rows were laid out by; None where it has no proof."""
    if not has_file(folder, FILE):
        return None
    try:
        return _rules(read_object(folder / FILE, CheckpointError)["rules"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def other_sizes(folder: Path, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Sizes that a model folder's preprocessor_config.json gives otherwise than its training had: name -> both."""
    rules = trained_rules(folder)
    if rules is None:
        return {}
    return {name: (size, getattr(rules, name)) for name, size in sizes.items() if getattr(rules, name) != size}


def warn_of_other_rules(folder: Path, rules: VisionRules) -> None:
    """A line for each key by which pictures are seen otherwise than in the training that wrote the folder."""
    trained = trained_rules(folder)
    if trained is None:
        return
    for key, value in _KEYS.items():
        now, then = value(rules), value(trained)
        if now != then:
            warn(f"{key} is {now}, and was {then} in training: pictures or videos are seen otherwise ({key}={then})")


# Keys, and what a user would write for them.
_SAME_NAME = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "render_timestamp", "use_pic_id")
_KEYS: dict[str, Callable[[VisionRules], Any]] = {
    **{name: attrgetter(name) for name in _SAME_NAME},
    "video_fps": attrgetter("frames.fps"),
    "video_min_frames": attrgetter("frames.least"),
    "video_max_frames": attrgetter("frames.most"),
    "video_target_frames": attrgetter("frames.target"),
    "video_frames_sample": attrgetter("frames.sample"),
    "exif_orientation": attrgetter("upright"),
    "video_positions": attrgetter("positions"),
}


def _proof(
    row: VisionRow, tokenizer: Tokenizer, rules: VisionRules, thinking: Thinking, max_seq_len: int, pool: MediaPool
) -> dict[str, str]:
    header_of = headers_from(pool, rules.limits)
    made = VisionAssembler(tokenizer, rules, thinking).sample(row, max_seq_len, "drop", header_of)
    if not isinstance(made, Assembled):
        raise BadRow(made.kind, made.reason)
    return proof_of(made.sample, rules.limits, lambda work: pool.run(work, work.medium.places[0].name, rules.limits))


def _stored(row: VisionRow, limits: MediaLimits) -> dict[str, Any] | None:
    """None where its media are too large to be kept with every checkpoint."""
    small = replace(limits, bytes=MOST_BYTES)
    try:
        contents = [[read(place, small) for place in medium.sources] for medium in row.media]
    except MediaError as error:
        if error.kind == "too_many_bytes":
            return None
        raise
    if sum(len(content) for each in contents for content in each) > MOST_BYTES:
        return None
    media = [
        {
            "contents": [base64.b64encode(content).decode() for content in each],
            "video": medium.video,
            "stamps": medium.stamps,
            "frames": medium.frames,
            "declared": medium.declared,
        }
        for medium, each in zip(row.media, contents)
    ]
    return {"messages": [asdict(m) for m in row.messages], "media": media, "all_trained": row.all_trained}


def _row(entry: dict[str, Any]) -> VisionRow:
    media = tuple(
        GivenMedium(
            tuple(
                MediaPlace(label=f"stored picture {n}", content=base64.b64decode(content, validate=True))
                for content in one["contents"]
            ),
            bool(one["video"]),
            tuple(one["stamps"]),
            tuple(one["frames"]),
            tuple(one["declared"]) if one["declared"] else None,
        )
        for n, one in enumerate(entry["media"], 1)
    )
    messages = tuple(ChatMessage(**{**m, "tool_calls": tuple(m["tool_calls"])}) for m in entry["messages"])
    return VisionRow(messages, media, all_trained=bool(entry["all_trained"]))


def _rules(stored: dict[str, Any]) -> VisionRules:
    parts = {
        "frames": FrameRules(**stored["frames"]),
        "template": VisionTemplate(**stored["template"]),
        "limits": MediaLimits(**stored["limits"]),
    }
    return VisionRules(**{**stored, **parts})
