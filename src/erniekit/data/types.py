"""The nouns of the data path, in the order a line meets them: Conversation -> Sample -> Pack -> Batch.

Everything before Batch is plain Python and numpy; only `Batch` holds torch tensors (built in collate.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from erniekit.printable import plain, public

if TYPE_CHECKING:
    import torch

LONGEST_REASON = 400  # characters
IGNORE = -100  # a label that is not trained
TEXT, IMAGE, VIDEO = 0, 1, 2  # of Batch.modality; the latter two take the vision experts
PICTURES = "vision"  # the tower that takes Batch.vision


@dataclass(frozen=True)
class ChatMessage:
    role: str  # system | user | assistant | tool
    content: str
    trained: bool = True  # assistant messages only: whether this answer carries loss
    tool_calls: tuple[dict[str, Any], ...] = ()
    thought: str = ""  # assistant messages only: the reasoning before the answer, where `content` does not hold it


@dataclass(frozen=True)
class RowContent:
    """The content of a row of any stage: by this rows are compared and measured (quality.py)."""

    parts: tuple[tuple[ChatMessage, ...], ...]
    answers: tuple[ChatMessage, ...] = ()  # the messages among which trained answers are
    tools: tuple[dict[str, Any], ...] = ()
    label: str = ""  # a verdict or a class: rows that differ in it differ in content


class ParsedRow(Protocol):
    """A row as a stage's reader gives it: Conversation, Preference, Unpaired, ClassRow."""

    def contents(self) -> RowContent: ...


@dataclass(frozen=True)
class Conversation:
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    unused: tuple[str, ...] = field(default=(), compare=False)  # fields of its row that hold what no reader takes

    def contents(self) -> RowContent:
        return RowContent((self.messages,), self.messages, self.tools)


UNREADABLE = "unreadable"  # the kind of a row behind which the rest of its file could not be read


@dataclass(frozen=True)
class RowProblem:
    """A row that cannot be used, or was dropped by a rule. `kind` is a short slug that reports count by; `reason` may
    quote the row, and is kept as it prints."""

    file: str
    line: int  # 1-based line (JSONL) or row number (JSON array, parquet)
    kind: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", plain(self.reason, LONGEST_REASON))
        object.__setattr__(self, "file", public(self.file))


@dataclass(frozen=True)
class SampleMedia:
    """The pictures and videos of a sample: what its tokens were laid out for, and how to get the patches, which are
    made when a batch is assembled."""

    modality: np.ndarray  # uint8 [n]
    positions: np.ndarray  # int32 [n, 3]
    grids: np.ndarray  # int32 [pictures and videos, 3]: t, h, w in patches
    sources: tuple[Any, ...]  # data/media's reference of each: where it is, and every choice made about it

    @property
    def patches(self) -> int:
        return int(self.grids.prod(1).sum())


@dataclass(frozen=True)
class Sample:
    """One training example. labels[i] is the target of position i (already shifted); IGNORE where not trained."""

    ids: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]
    media: SampleMedia | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Pack:
    """Samples that share one row; attention never crosses from one to the next."""

    samples: tuple[Sample, ...]
    index: int = 0  # global pack number: what a resume counts


@dataclass(frozen=True)
class SharedKeys:
    """Where a segment's queries look at other keys than its own: a prompt computed once for several answers.

    Segment s of cu_seqlens has keys index[bounds[s]:bounds[s + 1]]; causal, aligned at the end.
    """

    index: torch.Tensor  # int64 [keys], places in the flattened [B * L] tokens, segment after segment
    bounds: torch.Tensor  # int32 [segments + 1]
    longest: int
    tokens: int | None = None  # with keys; None: those of the queries
    copies: int = 2  # of a key in the index, at most


class Future(NamedTuple):
    """What layers that predict further tokens need: the 1st, 2nd ... next input and its label, within a document."""

    ids: torch.Tensor  # int64 [B, L, depth]
    labels: torch.Tensor  # int64 [B, L, depth], IGNORE past a document's end or where the position is not trained
    trained: tuple[int, ...] = ()  # labels of each depth that are trained, once they are counted


@dataclass(frozen=True)
class Pairs:
    """The preference pairs of a micro-batch, numbered through its rows."""

    segment: torch.Tensor  # int64 [B, L]: 2 * pair where chosen tokens are scored, 2 * pair + 1 rejected, -1 elsewhere
    count: int
    score_delta: torch.Tensor  # float32 [count]
    reference: torch.Tensor | None = None  # float32 [2 * count]: the reference's log-prob sums, once they are known
    baseline: torch.Tensor | None = None  # float32 []: what KTO measures gains from, once it is known


@dataclass(frozen=True)
class Unseen:
    """A picture of which no features are kept yet. In host memory."""

    start: int  # its first row
    pixels: torch.Tensor  # uint8 [rows, 3 * 14 * 14]
    grid: tuple[int, int, int]
    medium: Any  # data/media's reference; None: not to be kept, as its pixels could not be read


class Vision(NamedTuple):
    """Pictures and video frames of a micro-batch, in the order of their places in the flattened [B * L] tokens.

    A picture of grid (t, h, w) is t * h * w patches, frame after frame; inside a frame 2x2 blocks row-major, then the
    four patches of a block. A picture has t = 1; a video's t is even.
    """

    # uint8 [P, 3 * 14 * 14], channel first, not normalised; or kept features (data/vision/features.py), as many rows
    patches: torch.Tensor
    grids: torch.Tensor  # int64 [pictures and videos, 3]: t, h, w in patches; in host memory
    places: torch.Tensor  # int64 [V]: which of the flattened tokens take the features, in their order
    unseen: tuple[Unseen, ...] = ()  # whose features are still to be put into their rows of `patches`


class PictureCounts(NamedTuple):
    """How much of pictures a micro-batch holds; sums of these are of a step. encoded: those whose pixels are here, and
    not features that were kept."""

    vision_tokens: int = 0  # that take the vision experts, marks around pictures too
    patches: int = 0
    features: int = 0  # tokens that patches become
    encoded_patches: int = 0
    encoded_features: int = 0
    squares: int = 0  # sum over frames that are encoded of their squared patch counts


class EmbeddingNoise(NamedTuple):
    """Of each token, what its noise is drawn from and how large that is at most; 0 on padding."""

    keys: torch.Tensor  # int32 [B, L]
    sizes: torch.Tensor  # float32 [B, L]


class More(NamedTuple):
    """What only some models or stages need of a batch, besides its tokens."""

    real: torch.Tensor | None = None
    shared: SharedKeys | None = None
    future: Future | None = None
    trained: int | None = None  # labels that are; without it the head must read it from the device
    picture_labels: int | None = None  # of Batch
    vision: Vision | None = None
    modality: torch.Tensor | None = None  # of Batch
    vision_tokens: int | None = None  # of Batch
    members: torch.Tensor | None = None  # of Batch
    noise: EmbeddingNoise | None = None  # of Batch
    inputs: dict[str, Any] | None = None  # of Batch

    def input_of(self, tower: str) -> Any:
        """What a tower in front of the model takes, by its name; None: nothing."""
        return self.vision if tower == PICTURES else (self.inputs or {}).get(tower)


@dataclass
class Batch:
    """One micro-batch. A row is documents end to end, then padding (its own last document, never trained).

    Where rows of many lengths were joined (collate.py's `collate_joined`), all of them are in one row of tensors."""

    input_ids: torch.Tensor  # int64 [B, L]
    labels: torch.Tensor  # int64 [B, L], shifted, IGNORE where not trained
    positions: torch.Tensor  # int64 [B, L], restart at 0 in each document; [B, L, 3] (t, h, w) where a model sees
    cu_seqlens: torch.Tensor  # int32 [documents + 1], bounds in the flattened [B * L] tokens; rows are bounds too
    max_doc: int  # longest document
    num_label_tokens: int  # labels != IGNORE
    num_tokens: int = 0  # real tokens, padding apart
    pack_indices: tuple[int, ...] = field(default_factory=tuple)  # which packs these rows are, for reports
    packed: bool = True  # some row holds more than one document (padding apart)
    sum_squares: int = 0  # sum of squared document lengths, for FLOP counts
    real: torch.Tensor | None = None  # bool [B, L], False on padding; None: nothing is padding
    shared: SharedKeys | None = None
    pairs: Pairs | None = None
    future: Future | None = None
    vision: Vision | None = None  # None: no picture in this batch
    modality: torch.Tensor | None = None  # uint8 [B, L]: TEXT, IMAGE or VIDEO; None: a text model
    picture_labels: int | None = None  # num_label_tokens of documents with a picture; None: not counted, or cut since
    vision_tokens: int | None = None  # of modality, those that are not text; None: it is in host memory, to be counted
    # bool [rows, L]: which tokens are of which row of the data, where several rows were joined; None: none were
    members: torch.Tensor | None = None
    # stage KTO: the prompts with other rows' answers, measured before the step; stays in host memory until then
    mismatched: Batch | None = None
    noise: EmbeddingNoise | None = None  # on embeddings, in training; None: there is none
    # What towers other than that of pictures take, by their names: NamedTuples with `places`, as Vision is one. Tensors
    # in them go to the device, numbers stay in host memory. Nothing in data/ makes them yet.
    inputs: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """Of the data, whatever rows its tensors have."""
        return int((self.input_ids if self.members is None else self.members).shape[0])

    @property
    def weight(self) -> int:
        """What a step's summed loss is divided by, added up over all its micro-batches."""
        return self.num_label_tokens if self.pairs is None else self.pairs.count

    def more(self) -> More:
        counts = (self.num_label_tokens, self.picture_labels)
        of_pictures = (self.modality, self._vision_tokens())
        return More(
            self.real, self.shared, self.future, *counts, self.vision, *of_pictures, self.members, self.noise,
            self.inputs,
        )  # fmt: skip

    def tower_inputs(self) -> dict[str, Any]:
        """What every tower takes of this batch, by its name."""
        return {**({} if self.vision is None else {PICTURES: self.vision}), **(self.inputs or {})}

    def with_tower_inputs(self, inputs: dict[str, Any]) -> Batch:
        others = {name: value for name, value in inputs.items() if name != PICTURES}
        return replace(self, vision=inputs.get(PICTURES), inputs=others or None)

    def _vision_tokens(self) -> int | None:
        """Counted on the host only: on a device it would wait for what is computed there."""
        if self.vision_tokens is not None or self.modality is None or self.modality.device.type != "cpu":
            return self.vision_tokens
        return int((self.modality != TEXT).sum())

    def shown(self) -> PictureCounts:
        vision, tokens = self.vision, self._vision_tokens() or 0
        if vision is None:
            return PictureCounts(tokens)
        everything = [tuple(grid) for grid in vision.grids.tolist()]
        pixels_here = not vision.patches.dtype.is_floating_point
        looked = everything if pixels_here else [one.grid for one in vision.unseen]
        patches, seen = (sum(t * h * w for t, h, w in grids) for grids in (everything, looked))
        features = len(vision.places)
        of_looked = features if pixels_here else features * seen // max(1, patches)
        return PictureCounts(tokens, patches, features, seen, of_looked, sum(t * (h * w) ** 2 for t, h, w in looked))

    def counted(self) -> Batch:
        """With the numbers of trained labels as these are now; in host memory."""
        future = self.future
        if future is not None:
            future = future._replace(trained=tuple(int((x != IGNORE).sum()) for x in future.labels.unbind(-1)))
        count = int((self.labels != IGNORE).sum())
        return replace(self, num_label_tokens=count, future=future, picture_labels=None)

    def documents(self) -> torch.Tensor | None:
        """cu_seqlens for the model; None when plain causal rows are the same: padding comes last."""
        return self.cu_seqlens if self.packed else None

    def to(self, device: torch.device, pin: bool = False) -> Batch:
        """pin: by way of pinned memory; only from there a copy overlaps with the host and the device's other work."""
        if device.type == "cpu":
            return self
        moved = {k: _to(getattr(self, k), device, pin) for k in TENSORS}
        return replace(self, **moved, vision_tokens=self._vision_tokens())

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for k in TENSORS for tensor in _inside(getattr(self, k))]


TENSORS = (
    "input_ids", "labels", "positions", "cu_seqlens", "real", "shared", "pairs", "future", "vision", "modality",
    "members", "noise", "inputs",
)  # fmt: skip


def _to(value: Any, device: torch.device, pin: bool) -> Any:
    """Tensors, and the tensors inside the nouns above."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Vision):
        return value._replace(**{name: _to(getattr(value, name), device, pin) for name in ("patches", "places")})
    if isinstance(value, (SharedKeys, Pairs)):
        return type(value)(**{name: _to(item, device, pin) for name, item in vars(value).items()})
    if isinstance(value, dict):
        return {name: _to(item, device, pin) for name, item in value.items()}
    if isinstance(value, tuple):
        items = [_to(item, device, pin) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    pinned = value.pin_memory() if pin and value.device.type == "cpu" else value
    return pinned.to(device, non_blocking=True)


def _inside(value: Any) -> list[torch.Tensor]:
    if hasattr(value, "record_stream"):
        return [value]
    if isinstance(value, (SharedKeys, Pairs)):
        value = tuple(vars(value).values())
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in _inside(item)] if isinstance(value, tuple) else []
