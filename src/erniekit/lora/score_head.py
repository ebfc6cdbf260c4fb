"""The score head in an adapter's folder, as PEFT stores it: a whole weight beside the low-rank updates
(modules_to_save). Its classes decide what is built, so they are read before a base is opened.

Called by peft_files.py, api_load.py, export/run.py and recipes/score_heads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from erniekit.checkpoint.manifest import Verify
from erniekit.checkpoint.model_folder import ModelFolder, read_json
from erniekit.checkpoint.safe import check_safetensors
from erniekit.checkpoint.shards import write_json
from erniekit.checkpoint.slices import TensorFiles
from erniekit.errors import CheckpointError
from erniekit.files.listed import has_file
from erniekit.models import score_head
from erniekit.printable import counted

FILE = "score_head.json"  # names of the classes: PEFT's files have no place for them
KEY = "base_model.model." + score_head.WEIGHT
WEIGHTS = "adapter_model.safetensors"
# What PEFT itself names in adapters of sequence classification: heads have one name or the other.
MODULES = ("classifier", "score")


def write_classes(adapter: Path, labels: Sequence[str]) -> None:
    write_json(adapter / FILE, {"id2label": {str(i): name for i, name in enumerate(labels)}})


def classes_of(adapter: Path) -> tuple[str, ...]:
    """Of an adapter's score head; none where it has none. One that others made has numbers for names."""
    if not has_file(adapter, WEIGHTS):
        return ()
    found = check_safetensors(adapter / WEIGHTS).tensors.get(KEY)
    if found is None:
        if has_file(adapter, FILE):
            raise headless(adapter)
        return ()
    rows = found.shape[0] if len(found.shape) == 2 else 0
    named = read_json(adapter / FILE).get("id2label") if has_file(adapter, FILE) else None
    kind = {"architectures": [score_head.ARCHITECTURE], "num_labels": rows, "id2label": named}
    labels = score_head.labels_in(kind, str(adapter / FILE if named is not None else adapter / WEIGHTS))
    if len(labels) != rows:
        raise CheckpointError(
            f"{FILE} names {counted(len(labels), 'class', 'classes')}; the adapter's score head has {rows}",
            where=str(adapter),
            fix="the files are of different adapters: download or copy it again",
        )
    return labels


def headless(adapter: Path) -> CheckpointError:
    """For an adapter of a classifier or reward model without the head it was trained with: on a text model it would
    load, and mean nothing."""
    return CheckpointError(
        f"the adapter was trained with a score head, which {WEIGHTS} does not hold",
        where=str(adapter),
        fix="the file is incomplete, or its head has another name than score: download or copy the adapter again",
    )


def open_base(base: Path, adapter: Path, verify: Verify = "auto") -> ModelFolder:
    """The model below an adapter: of one with a score head, a classifier or reward model with that head."""
    changes, head = head_on(base, [adapter])
    return ModelFolder(base, changes=changes, head=head, verify=verify)


def head_on(base: Path, adapters: Sequence[Path]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """What a score head among adapters makes of the model below them: changes of config.json, and the head."""
    heads = [(adapter, labels) for adapter in adapters if (labels := classes_of(adapter))]
    if not heads:
        return {}, None
    adapter, labels = heads[-1]
    if len(adapters) > 1:
        raise CheckpointError(
            "an adapter with a score head cannot be merged together with others",
            where=str(adapter),
            fix="merge it alone: the head was trained on what its own base and updates compute",
        )
    changes = score_head.changes(read_json(base / "config.json"), labels)
    return changes, TensorFiles({KEY: adapter / WEIGHTS}).read(KEY)
