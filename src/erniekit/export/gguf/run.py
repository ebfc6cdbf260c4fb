"""`erniekit export format=gguf`: one file for llama.cpp and Ollama with weights, tokenizer and chat template.

Called by export/run.py, which hands over an opened and checked source. Streams: one tensor in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import CheckpointError
from erniekit.export.gguf.chat import MODELFILE, jinja_template, modelfile, opens_with_bos
from erniekit.export.gguf.file import GgufTensors, GgufWriter, StoredTensor, library, write_header
from erniekit.export.gguf.metadata import ARCHITECTURES, check_expressible, shape_fields
from erniekit.export.gguf.names import further_tensors, gguf_names, stored_config
from erniekit.export.gguf.types import GgufType, gguf_type, stored_as
from erniekit.export.gguf.vocabulary import vocabulary_fields
from erniekit.export.streamed import streamed_by
from erniekit.models import MODELS
from erniekit.models.names import Entry, Run
from erniekit.models.score_head import refuse as refuse_score_head

_QUANTISATION_VERSION = 2  # GGML_QNT_VERSION


@dataclass(frozen=True)
class GgufPlan:
    """All that is settled before the first byte is written."""

    folder: ModelFolder
    tokenizer: Path
    kind: GgufType
    entries: list[Entry]
    tensors: dict[str, StoredTensor]  # in the file's order
    further: dict[str, torch.Tensor]  # no weights of ours

    @property
    def file(self) -> str:
        return f"model-{self.kind.name}.gguf"

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def gguf_plan(folder: ModelFolder, tokenizer: Path, type_key: str) -> GgufPlan:
    """Raises where the package, or llama.cpp for this model, is missing something."""
    library()
    refuse_score_head(folder.config.labels, "GGUF", str(folder.path))
    check_expressible(folder.config, str(folder.path / "config.json"))
    config = stored_config(folder.config)
    kind, entries, further = gguf_type(type_key, config), gguf_names(config), further_tensors(config)
    state = folder.meta().state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in further.items()}
    for entry in entries:
        pieces = entry.write(torch.empty_like(state[entry.ours], device="meta"))
        shapes |= {name: tuple(piece.shape) for name, piece in zip(entry.theirs, pieces)}
    tensors = {name: StoredTensor(name, shape, stored_as(kind, name, shape)) for name, shape in shapes.items()}
    return GgufPlan(folder, tokenizer, kind, entries, tensors, further)


def write_gguf(plan: GgufPlan, folder: Path, get: Callable[[str], torch.Tensor], name: str) -> GgufWeights:
    """The file and its Modelfile in `folder`. get: our name -> the weight; name: what the model calls itself."""
    config = stored_config(plan.folder.config)
    tokenizer = load_tokenizer(plan.tokenizer, config.vocab_size)
    bos = opens_with_bos(tokenizer)
    fields = {
        "general.type": "model",
        "general.name": name,
        "general.file_type": plan.kind.file_type,
        "general.quantization_version": _QUANTISATION_VERSION,
        **shape_fields(config),
        **vocabulary_fields(tokenizer, config.vocab_size),
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.chat_template": jinja_template(tokenizer),
    }
    path = folder / plan.file
    write_header(path, ARCHITECTURES[config.family], fields, list(plan.tensors.values()))
    header = path.stat().st_size
    writer = GgufWriter(path, plan.folder.path)
    for name, tensor in plan.further.items():
        writer.add(plan.tensors[name], tensor)
    for entry in plan.entries:
        for name, piece in zip(entry.theirs, entry.write(get(entry.ours))):
            writer.add(plan.tensors[name], piece)
    writer.close()
    (folder / MODELFILE).write_text(modelfile(plan.file, tokenizer, bos), encoding="utf-8")
    return GgufWeights(plan, GgufTensors(path, header, list(plan.tensors.values())), writer.checksums)


class GgufWeights:
    """What was written, as weights of our model."""

    def __init__(self, plan: GgufPlan, tensors: GgufTensors, checksums: dict[str, int]) -> None:
        self.plan, self.tensors, self.checksums = plan, tensors, checksums
        self._entries = {entry.ours: entry for entry in plan.entries}

    def check(self) -> None:
        """Every tensor of the file reads back as it was written."""
        for name, checksum in self.checksums.items():
            if self.tensors.checksum(name) != checksum:
                raise CheckpointError(
                    f"{name} changed on its way to the disk; nothing was published",
                    where=self.plan.file,
                    fix="check the disk and the memory of this machine, then export again",
                )

    def model(self) -> torch.nn.Module:
        """The model with these weights in fp32, one layer in memory at a time."""
        config = stored_config(self.plan.folder.config)
        with torch.device("meta"):
            model = MODELS.get(config.family).build(config)
        return streamed_by(model, self._fill)

    def _fill(self, name: str, slot: torch.Tensor, first: int) -> None:
        entry = self._entries[name]
        if entry.runs == (Run(0),):  # the same rows
            self.tensors.fill(entry.theirs[0], slot, first)
            return
        assert not first, f"{name} is read whole"
        pieces = entry.write(torch.empty_like(slot, dtype=torch.float32))
        for theirs, piece in zip(entry.theirs, pieces):
            self.tensors.fill(theirs, piece)
        slot.copy_(entry.read(pieces))
