"""A checkpoint's fingerprint: a few tokens, their loss and logits. What loads, merges or exports it must repeat them.

Made by train when saving; checked by resume, merge and export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from erniekit.checkpoint.safe import check_safetensors
from erniekit.checkpoint.shards import readable_by_all
from erniekit.data.types import IGNORE, Batch
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file

FILE = "probe.safetensors"
Answer = Callable[[torch.Tensor], torch.Tensor]  # token ids [1, n] -> logits [1, n, V]
KEPT_ROWS = 4  # positions whose whole logit row is stored
MAX_TOKENS = 1 << 16  # of a stored probe: it is run through the model whole


PACKED_BASE = " base"  # ends the setting of one taken over packed frozen weights, which the stored ones do not repeat


@dataclass(frozen=True)
class Probe:
    ids: torch.Tensor  # int64 [1, n]
    labels: torch.Tensor  # int64 [1, n], shifted
    loss: float = float("nan")
    rows: torch.Tensor | None = None  # fp32 [KEPT_ROWS, V]: the last logits
    digest: str = ""  # sha256 of all logits as fp32 bytes
    setting: str = ""  # device, dtype, torch: bit-equality is promised only where this is equal


def probe_from(batch: Batch, tokens: int) -> Probe:
    """The first tokens of a training batch; if none of them is trained, all of them count."""
    n = min(tokens, int(batch.cu_seqlens[1]))
    ids, labels = batch.input_ids[:1, :n].cpu().clone(), batch.labels[:1, :n].cpu().clone()
    if not (labels != IGNORE).any():
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
    return Probe(ids, labels)


def measure(answer: Answer, probe: Probe, setting: str) -> Probe:
    """The probe with a model's answer. `setting`: device, dtype, torch and layout it was computed in."""
    logits = answer(probe.ids)[0].float().cpu()
    loss = F.cross_entropy(logits, probe.labels[0], ignore_index=IGNORE)
    digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    return Probe(probe.ids, probe.labels, float(loss), logits[-KEPT_ROWS:].clone(), digest, setting)


def save(folder: Path, probe: Probe) -> None:
    assert probe.rows is not None
    tensors = {"ids": probe.ids, "labels": probe.labels, "rows": probe.rows}
    # float.hex keeps every bit of the loss in text. One entry: the library writes several in random order,
    # and two equal checkpoints should be equal files.
    said = {"loss": probe.loss.hex(), "digest": probe.digest, "setting": probe.setting}
    save_file(tensors, str(folder / FILE), metadata={"probe": json.dumps(said)})
    readable_by_all(folder / FILE)


def load(folder: Path) -> Probe | None:
    if not has_file(folder, FILE):
        return None
    path = folder / FILE
    said = check_safetensors(path).metadata.get("probe", "")
    try:
        with safe_open(str(path), framework="pt") as file:
            ids, labels, rows = (file.get_tensor(n) for n in ("ids", "labels", "rows"))
        meta = json.loads(said)
        loss, digest, setting = float.fromhex(meta["loss"]), str(meta["digest"]), str(meta["setting"])
        whole = all(t.dtype == torch.int64 and t.ndim == 2 and t.shape[0] == 1 for t in (ids, labels))
        if not whole or ids.shape != labels.shape or ids.shape[1] > MAX_TOKENS or rows.ndim != 2 or int(ids.min()) < 0:
            raise ValueError("its tensors are not those of a probe")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"{FILE} is not a probe that erniekit wrote: {str(error)[:200]}",
            where=str(path),
            fix="move it away: the folder is then used without this check",
        ) from None
    return Probe(ids, labels, loss, rows, digest, setting)


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
    assert probe.rows is not None
    then = next((d for d in TOLERANCE if str(d).removeprefix("torch.") in probe.setting), torch.float32)
    return max(TOLERANCE[d] for d in (then, *dtypes)) * max(1.0, float(probe.rows.abs().max()))


def compare(logits: torch.Tensor, expected: Probe, tolerance: float) -> Verdict:
    """`logits` [1, n, V] of the probe's tokens against the stored ones."""
    return _verdict(measure(lambda _: logits, expected, ""), expected, tolerance)


def check(answer: Answer, expected: Probe, what: str, setting: str, dtype: torch.dtype) -> Verdict:
    """Measures again; raises when the answer is not the saved one. Same device, dtype and torch: bit for bit."""
    assert expected.rows is not None
    tolerance = TOLERANCE[dtype] * max(1.0, float(expected.rows.abs().max()))
    verdict = _verdict(measure(answer, expected, setting), expected, tolerance)
    if not verdict.exact and not verdict.max_difference <= tolerance:
        raise CheckpointError(
            f"{what} does not answer as it did when saved: {verdict.failed()}",
            fix="the files were changed or belong to another base model; use another checkpoint",
        )
    return verdict


def _verdict(got: Probe, expected: Probe, tolerance: float) -> Verdict:
    assert got.rows is not None
    assert expected.rows is not None
    difference = float((got.rows - expected.rows).abs().max())
    return Verdict(got.digest == expected.digest, got.loss, expected.loss, difference, tolerance)
