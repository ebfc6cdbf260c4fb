"""A checkpoint's fingerprint: a few tokens, their loss and logits. What loads, merges or exports it must repeat them.
That of a vision model begins with a small picture, so that tower, resampler and vision experts are tested, too.

Made by train when saving; checked by resume, merge and export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from erniekit.checkpoint.safe import check_safetensors
from erniekit.checkpoint.shards import name_weights
from erniekit.checkpoint.tensor_file import write_tensors
from erniekit.data.collate import one_document
from erniekit.data.types import IGNORE, IMAGE, VIDEO, Batch, More, Vision
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file

FILE = "probe.safetensors"
Answer = Callable[..., torch.Tensor]  # token ids [1, n], and by name what Probe.more() gives -> logits [1, n, V]
KEPT_ROWS = 4  # positions whose whole logit row is stored
MAX_TOKENS = 1 << 16  # of a stored probe: it is run through the model whole
_NOT_OURS = (
    SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError, OverflowError,
)  # fmt: skip


PACKED_BASE = " base"  # ends the setting of one taken over packed frozen weights, which the stored ones do not repeat


@dataclass(frozen=True)
class ProbePicture:
    """The inputs of a vision-language model besides the token ids."""

    patches: torch.Tensor  # uint8 [P, 3 * 14 * 14]
    grids: torch.Tensor  # int64 [pictures, 3]
    positions: torch.Tensor  # int64 [1, n, 3]
    modality: torch.Tensor  # uint8 [1, n]
    places: torch.Tensor  # int64 [V]


PICTURE = tuple(f.name for f in fields(ProbePicture))


@dataclass(frozen=True)
class Probe:
    ids: torch.Tensor  # int64 [1, n]
    labels: torch.Tensor  # int64 [1, n], shifted
    loss: float = float("nan")
    rows: torch.Tensor | None = None  # fp32 [KEPT_ROWS, V]: the last logits
    digest: str = ""  # sha256 of all logits as fp32 bytes
    setting: str = ""  # device, dtype, torch: bit-equality is promised only where this is equal
    picture: ProbePicture | None = None  # None: text only

    def more(self, device: torch.device | None = None) -> dict[str, Any]:
        """What a model's forward takes besides the ids, by name."""
        p = self.picture
        if p is None:
            return {}
        patches, positions, modality, places = (
            x if device is None else x.to(device) for x in (p.patches, p.positions, p.modality, p.places)
        )
        return {"positions": positions, "more": More(vision=Vision(patches, p.grids, places), modality=modality)}

    def fits(self, config: Any) -> bool:
        """Whether a model of this config can be run on it: the file may be of another model, or anyone's."""
        p, v = self.picture, config.vision
        if int(self.ids.max()) >= config.vocab_size or (p is not None and v is None):
            return False
        if p is None:
            return True
        frames, height, width = p.grids[0].tolist()
        whole = frames == 1 and height % v.merge == width % v.merge == 0
        return whole and p.patches.shape[1] == v.patch_size and len(p.places) == height * width // v.merge**2

    def difference(self, rows: torch.Tensor) -> float:
        """Largest, of the last logit rows of a model; infinite where they have another shape."""
        if self.rows is None or rows.shape != self.rows.shape:
            return float("inf")
        return float((rows - self.rows).abs().max())

    def largest(self) -> float:
        """Of the kept logits that are numbers: one that is not widens no tolerance."""
        assert self.rows is not None
        return float(self.rows[self.rows.isfinite()].abs().max()) if self.rows.isfinite().any() else 0.0

    def batch(self, length: int) -> Batch:
        """One row, padded to `length`."""
        made = one_document(self.ids, length)
        p = self.picture
        if p is None:
            return made
        pad = length - self.ids.shape[1]
        return replace(
            made,
            positions=F.pad(p.positions, (0, 0, 0, pad)),
            modality=F.pad(p.modality, (0, pad)),
            vision=Vision(p.patches, p.grids, p.places),
        )


def probe_from(batch: Batch, tokens: int) -> Probe:
    """The first tokens of a training batch; if none of them is trained, all of them count."""
    n = min(tokens, int(batch.cu_seqlens[1]))
    ids, labels = batch.input_ids[:1, :n].cpu().clone(), batch.labels[:1, :n].cpu().clone()
    if not (labels != IGNORE).any():
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
    return Probe(ids, labels)


@dataclass(frozen=True)
class PictureTokens:
    """How the tokenizer writes a picture, and how the model cuts it."""

    start: int
    placeholder: int
    end: int
    patch_size: int  # values of a patch
    merge: int


def with_picture(probe: Probe, tokens: PictureTokens) -> Probe:
    """The probe behind a picture of noise, 2 x 2 tokens of it."""
    side = 2 * tokens.merge
    noise = torch.Generator().manual_seed(0)
    patches = torch.randint(0, 256, (side * side, tokens.patch_size), generator=noise, dtype=torch.uint8)
    wide = side // tokens.merge
    shown = [tokens.start, *[tokens.placeholder] * wide**2, tokens.end]
    text = probe.ids[0][~torch.isin(probe.ids[0], torch.tensor(shown))]
    labels = probe.labels[0][~torch.isin(probe.ids[0], torch.tensor(shown))]
    ids = torch.cat([torch.tensor(shown), text])
    spots = torch.arange(1, 1 + wide**2)
    positions = torch.arange(len(ids))[:, None].repeat(1, 3)
    positions[spots] = torch.stack(
        [torch.ones(wide**2, dtype=torch.int64), 1 + (spots - 1) // wide, 1 + (spots - 1) % wide], -1
    )
    positions[1 + wide**2 :] -= wide**2 - wide  # text goes on behind the longer side
    modality = (torch.arange(len(ids)) < len(shown)).to(torch.uint8) * IMAGE
    picture = ProbePicture(patches, torch.tensor([[1, side, side]]), positions[None], modality[None], spots)
    labels = torch.cat([torch.full((len(shown),), IGNORE), labels])
    if not (labels != IGNORE).any():
        labels[-2:-1] = ids[-1:]
    return Probe(ids[None], labels[None], picture=picture)


def measure(answer: Answer, probe: Probe, setting: str) -> Probe:
    """The probe with a model's logits and loss. `setting`: device, dtype, torch and layout they were computed in."""
    logits = answer(probe.ids, **probe.more())[0].float().cpu()
    loss = F.cross_entropy(logits, probe.labels[0], ignore_index=IGNORE)
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    return replace(probe, loss=float(loss), rows=logits[-KEPT_ROWS:].clone(), digest=digest, setting=setting)


def save(folder: Path, probe: Probe) -> None:
    assert probe.rows is not None
    tensors = {"ids": probe.ids, "labels": probe.labels, "rows": probe.rows}
    if probe.picture is not None:
        tensors |= {name: getattr(probe.picture, name).contiguous() for name in PICTURE}
    # float.hex keeps every bit of the loss in text. One entry: the library writes several in random order,
    # and two equal checkpoints should be equal files.
    metadata = {"loss": probe.loss.hex(), "digest": probe.digest, "setting": probe.setting}
    name_weights(folder)
    (folder / FILE).unlink(missing_ok=True)
    write_tensors(folder / FILE, tensors, {"probe": json.dumps(metadata)})


def load(folder: Path, config: Any = None) -> Probe | None:
    """config: of the model that will be run on it; one that it does not fit is refused."""
    if not has_file(folder, FILE):
        return None
    path = folder / FILE
    metadata = check_safetensors(path).metadata.get("probe", "")
    try:
        with safe_open(str(path), framework="pt") as file:
            ids, labels, rows = (file.get_tensor(n) for n in ("ids", "labels", "rows"))
            pictures = {n: file.get_tensor(n) for n in PICTURE if n in file.keys()}  # noqa: SIM118 - no mapping
        meta = json.loads(metadata)
        loss, digest, setting = float.fromhex(meta["loss"]), str(meta["digest"]), str(meta["setting"])
        _check_tensors(ids, labels, rows)
        picture = _picture_of(pictures, ids) if pictures else None
        found = Probe(ids, labels, loss, rows, digest, setting, picture)
    except _NOT_OURS as error:
        raise CheckpointError(
            f"{FILE} is not a probe that erniekit wrote: {str(error)[:200]}",
            where=str(path),
            fix="move it away: the folder is then used without this check",
        ) from None
    if config is not None:
        require_fit(found, config, folder)
    return found


def require_fit(probe: Probe, config: Any, folder: Path) -> None:
    """Raises where a model of this config cannot be run on the probe of `folder`."""
    if not probe.fits(config):
        raise CheckpointError(
            f"{FILE} is of another model than this: it holds tokens or pictures that this one does not take",
            where=str(folder / FILE),
            fix="move it away: the folder is then used without this check",
        )


def _check_tensors(ids: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor) -> None:
    """Of a file that anybody may have written, as `_picture_of`."""
    count = ids.shape[1] if ids.ndim == 2 else 0
    whole = (
        0 < count <= MAX_TOKENS
        and all(t.dtype == torch.int64 and t.shape == (1, count) for t in (ids, labels))
        and rows.dtype == torch.float32
        and rows.ndim == 2
        and rows.shape[0] == min(KEPT_ROWS, count)
        and rows.shape[1] > 0
        and bool((ids >= 0).all())
        and bool(((labels == IGNORE) | ((labels >= 0) & (labels < rows.shape[1]))).all())
    )
    if not whole:
        raise ValueError("its tensors are not those of a probe")


def _picture_of(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> ProbePicture:
    """Of a file that anybody may have written: whatever does not fit is a ValueError."""
    picture, count = ProbePicture(**tensors), ids.shape[1]  # a TypeError where some are missing
    whole = (
        picture.patches.dtype == torch.uint8
        and picture.patches.ndim == 2
        and picture.modality.dtype == torch.uint8
        and picture.modality.shape == ids.shape
        and int(picture.modality.max()) <= VIDEO
        and picture.grids.shape == (1, 3)
        and picture.positions.shape == (1, count, 3)
        and all(t.dtype == torch.int64 for t in (picture.grids, picture.positions, picture.places))
        and bool(((picture.grids > 0) & (picture.grids <= MAX_TOKENS)).all())
        and picture.patches.shape[0] == int(picture.grids.prod(1).sum()) <= MAX_TOKENS
        and picture.places.ndim == 1
        and bool(((picture.places >= 0) & (picture.places < count)).all())
        and bool(((picture.positions >= 0) & (picture.positions <= MAX_TOKENS)).all())
    )
    if not whole:
        raise ValueError("its picture does not fit its tokens")
    return picture


@dataclass(frozen=True)
class Verdict:
    exact: bool
    loss: float
    expected_loss: float
    max_difference: float  # over the kept logit rows
    tolerance: float

    def line(self) -> str:
        if self.exact:
            return f"probe loss {self.loss:.6f} reproduced bit for bit"
        return f"probe loss {self.loss:.6f} (saved {self.expected_loss:.6f}), logits within {self.max_difference:.1e}"

    def failed(self) -> str:
        return (
            f"probe loss {self.loss:.6f}, was {self.expected_loss:.6f}; "
            f"logits differ by {self.max_difference:.2e}, allowed {self.tolerance:.2e}"
        )


# Rounding of the storage dtype, relative to the largest logit: merging or another device may round differently.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def allowed(probe: Probe, *dtypes: torch.dtype) -> float:
    """By the coarsest of the dtype the probe was computed in and those of weights or computation now."""
    then = next((d for d in TOLERANCE if str(d).removeprefix("torch.") in probe.setting), torch.float32)
    return max(TOLERANCE[d] for d in (then, *dtypes)) * max(1.0, probe.largest())


def compare(logits: torch.Tensor, expected: Probe, tolerance: float) -> Verdict:
    """`logits` [1, n, V] of the probe's tokens against the stored ones."""
    return _verdict(measure(lambda _, **more: logits, expected, ""), expected, tolerance)


def check(answer: Answer, expected: Probe, what: str, setting: str, dtype: torch.dtype, where: str = "") -> Verdict:
    """Measures again; raises when the result is not the saved one. Same device, dtype and torch: bit for bit."""
    tolerance = allowed(expected, dtype)
    verdict = _verdict(measure(answer, expected, setting), expected, tolerance)
    if not verdict.exact and not verdict.max_difference <= tolerance:
        raise CheckpointError(
            f"{what} does not answer as it did when saved: {verdict.failed()}",
            where=where,
            fix="the files were changed or belong to another base model; use another checkpoint",
        )
    return verdict


def _verdict(got: Probe, expected: Probe, tolerance: float) -> Verdict:
    assert got.rows is not None
    exact = got.digest == expected.digest
    return Verdict(exact, got.loss, expected.loss, expected.difference(got.rows), tolerance)
