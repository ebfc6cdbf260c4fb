"""Reading a model folder: which family, which layout, and its tensors one at a time (HF or Paddle, whole or sharded).

Called by recipes/build.py, export/, serve/ and api. The layout is recognised by tensor names, never by folder names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from erniekit import heartbeat
from erniekit.checkpoint.fp8_static import install_scales
from erniekit.checkpoint.manifest import MANIFEST, Verify, unreadable
from erniekit.checkpoint.model_sizes import check_sizes
from erniekit.checkpoint.published import Comparison, check_published
from erniekit.checkpoint.quantised import KEY as QUANTISED
from erniekit.checkpoint.quantised import QuantisedFiles, logical_files, stored_weights
from erniekit.checkpoint.safe import check_safetensors
from erniekit.checkpoint.slices import TensorFiles, fill_boxes
from erniekit.errors import CheckpointError
from erniekit.files import read_object, refuse_special
from erniekit.files.json_file import MAX_BYTES
from erniekit.files.listed import Listed
from erniekit.log import warn_once
from erniekit.model_contract import packed_layers
from erniekit.models import MODELS, find, score_head
from erniekit.models.config import DecoderConfig
from erniekit.models.family_check import check_config, check_names, check_plan, declared, stored_tensors
from erniekit.models.names import Entry
from erniekit.models.spec import ModelSpec
from erniekit.parallel.sharding import Box
from erniekit.printable import counted

GENERATION_FILES = ("generation_config.json",)
PREPROCESSOR = "preprocessor_config.json"
SIDE_FILES = (*GENERATION_FILES, PREPROCESSOR)
# Buffers some exporters store that are derived, not weights.
DERIVED = (".rotary_emb.inv_freq",)
_MAX_INDEX = 64 << 20  # bytes: some 500,000 tensors
_AGAIN = "download it again"
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    try:
        return read_object(path, CheckpointError, max_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing", where=str(path.parent), fix="check the folder") from None
    except OSError as error:
        raise unreadable(path, error) from error


class ModelFolder:
    """An opened model folder. Tensors are read lazily; at most one entry's tensors are in memory at a time.

    weights=False: a folder that need hold no more than config.json and a tokenizer, for a model from scratch.
    changes: values that replace those of config.json. head: a score head in the place of the files' own, where they
    have one: an adapter's. verify, probed: see `check_published`. A quantised folder
    reads as the plain weights it stands for.
    """

    def __init__(
        self,
        path: str | Path,
        weights: bool = True,
        changes: Mapping[str, Any] | None = None,
        head: torch.Tensor | None = None,
        verify: Verify = "auto",
        probed: bool = False,
    ) -> None:
        path = Path(path)
        self.path, self.head, self.verify = path, head, verify
        found = check_published(path, verify, probed) if weights else Comparison(whole=True)
        self.compared, self.edited = found  # every byte, where digests are recorded; settings that are not as saved
        if not Listed(path).allows("config.json"):
            raise CheckpointError(f"{MANIFEST} lists no config.json", where=str(path), fix="move the added file away")
        self.config_json = {**read_json(path / "config.json"), **(changes or {})}
        if self.config_json.get("auto_map"):
            warn_once(f"{path / 'config.json'} names code of its own (auto_map): it is not run, erniekit's own is used")
        self.spec: ModelSpec = find(self.config_json, str(path / "config.json"))
        self._on_disk = tensor_files(path) if weights else {}
        self.quantised = stored_weights(self.config_json, self._on_disk, path)  # by plain names; empty: nothing is
        self.config_json.pop(QUANTISED, None)  # what is built, and written again, is plain
        self.files = logical_files(self._on_disk, self.quantised)
        self.layout = self._layout()
        # A config without the key is settled by the files; Paddle writes the head even when tied.
        has_head = "lm_head.weight" in self.files
        self.config: DecoderConfig = self.spec.read_config(
            self.config_json, self.layout, has_head, str(path / "config.json")
        )
        if self.config_json.get("use_bias"):  # covers the head in Paddle, not in transformers' dense class
            self.config = replace(self.config, head_bias="lm_head.bias" in self.files)
        self.config = replace(self.config, labels=score_head.labels_in(self.config_json, str(path / "config.json")))
        if self.files and self.spec.settle is not None:
            self.config = self.spec.settle(self.config, self.files)
        if self.spec.preprocessed is not None and Listed(path).has(PREPROCESSOR):
            preprocessor = read_json(path / PREPROCESSOR)
            self.config = self.spec.preprocessed(self.config, preprocessor, str(path / PREPROCESSOR))
        self._open: dict[Path, Any] = {}
        self._slices: TensorFiles | None = None
        self._fits = False  # what the family declares has been compared with its model
        if self.files:
            check_sizes(self.config, self.files, self.slices().shape, path / "config.json")

    def _layout(self) -> str:
        if self.spec.layout_of is not None:
            return self.spec.layout_of(self.files)
        prefix = self.spec.paddle_prefix
        return "paddle" if prefix and any(n.startswith(prefix) for n in self.files) else "hf"

    def entries(self) -> list[Entry]:
        return self.spec.entries(self.config, self.layout)

    @property
    def new_head(self) -> bool:
        """A score head is configured and the files have none: a language model that becomes a classifier."""
        return bool(self.config.labels) and bool(self.files) and score_head.WEIGHT not in self.files

    def _file_of(self, name: str) -> Any:
        """The opened file that holds a tensor, by the name it has there."""
        if name not in self._on_disk:
            raise CheckpointError(f"tensor {name!r} is missing", where=str(self.path), fix="re-download the model")
        file = self._on_disk[name]
        if file not in self._open:
            self._open[file] = _open_file(file)
        if name not in self._open[file].keys():  # noqa: SIM118 - a safetensors handle, not a dict
            raise CheckpointError(
                f"{file.name} does not hold {name!r}, although the index lists it",
                where=str(self.path),
                fix="the files are of different downloads; fetch them again",
            )
        return self._open[file]

    def tensor(self, name: str) -> torch.Tensor:
        if name in self.quantised:
            return self.quantised[name].read(
                self.stored_tensor, lambda part: tuple(self._file_of(part).get_slice(part).get_shape())
            )
        return self.stored_tensor(name)

    def stored_tensor(self, name: str) -> torch.Tensor:
        """By the name it has in the files."""
        tensor = self._file_of(name).get_tensor(name)
        heartbeat.beat()
        # Older Paddle builds stored bf16 bits as uint16.
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor

    def read(self, entry: Entry) -> torch.Tensor:
        if self.head is not None and entry.ours == score_head.WEIGHT:
            return self.head
        return entry.read([self.tensor(name) for name in entry.theirs])

    @torch.no_grad()
    def fill(self, entry: Entry, out: torch.Tensor, first: int = 0) -> None:
        """Rows from `first` on straight into `out`, in its dtype: a chunk of a file is all the memory it takes."""
        if self.head is not None and entry.ours == score_head.WEIGHT:
            out.copy_(self.head[first : first + out.shape[0]])
            return
        here = tuple(slice(0, size) for size in out.shape)
        rows = slice(first, first + out.shape[0])
        fill_boxes(self.slices(), entry, [Box((rows, *here[1:]), here)], out)

    def slices(self) -> TensorFiles:
        """The same files for reading parts of tensors (slices.py): nothing is mapped, headers are kept."""
        if self._slices is None:
            self._slices = QuantisedFiles(self._on_disk, self.quantised) if self.quantised else TensorFiles(self.files)
        return self._slices

    def check_names(self) -> None:
        """Every tensor needed is there, and none is left over: a half-matching load never passes silently."""
        entries = self.entries()
        needed = {n for e in entries for n in e.theirs if not e.copy_of}
        allowed = {n for e in entries for n in e.theirs}
        if self.config.tie_word_embeddings:
            allowed.add("lm_head.weight")
        if self.new_head:
            needed.discard(score_head.WEIGHT)
            allowed |= {name for name in self.files if score_head.is_head(name)}
        missing = sorted(needed - self.files.keys())
        extra = sorted(n for n in self.files.keys() - allowed if not n.endswith(DERIVED))
        for what, names in (("missing", missing), ("unexpected", extra)):
            if names:
                shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
                raise CheckpointError(
                    f"{counted(len(names), f'{what} tensor')} for a {self.spec.name} model: {shown}",
                    where=str(self.path),
                    fix="the folder is incomplete or holds another model" + _or_names(self.spec),
                )

    def check_shapes(self, model: nn.Module) -> None:
        """Headers only: a config.json of another model is found before any weight is read."""
        state = model.state_dict()
        for entry in self.entries():
            if entry.copy_of:
                continue
            if entry.ours == score_head.WEIGHT and (self.new_head or self.head is not None):
                self._check_head(state[entry.ours].shape)
                continue
            expected = stored_tensors(entry, state[entry.ours].shape, declared(self.spec, "names"))
            for name, tensor in zip(entry.theirs, expected):
                found = self.slices().shape(name)
                if tuple(tensor.shape) != found:
                    raise CheckpointError(
                        f"{name} has shape {list(found)}, config.json asks for {list(tensor.shape)}",
                        where=str(self.path),
                        fix="config.json and the weights are of different models",
                    )
                if (kind := self.slices().dtype(name)) not in _WEIGHTS:
                    raise CheckpointError(
                        f"{name} is stored as {str(kind).removeprefix('torch.')}, which is not a weight by itself",
                        where=str(self.path),
                        fix="its scale or quantization_config is missing: download or quantise the model again",
                    )

    def _check_head(self, shape: torch.Size) -> None:
        if self.head is not None and self.head.shape != shape:
            raise CheckpointError(
                f"the adapter's score head is {list(self.head.shape)}, this model needs {list(shape)}",
                where=str(self.path),
                fix="the adapter belongs to another base model",
            )

    def dtype(self) -> torch.dtype:
        return self.tensor(self.entries()[0].theirs[0]).dtype

    def meta(self) -> nn.Module:
        """The model's modules and names, without memory for its weights."""
        with torch.device("meta"):
            model = self.spec.build(self.config)
        if not self._fits:
            check_config(self.spec, self.config, self.layout)
            check_plan(self.spec, self.config, model)
            check_names(self.spec, self.config, self.layout, model, sizes=not self.files)
            self._fits = True
        return model

    def build(
        self,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        store: Callable[[nn.Module], object] | None = None,
    ) -> nn.Module:
        """The model with these weights: built without memory, then filled tensor by tensor. One in static FP8 computes
        as an FP8 engine does. store: makes weights of the model without memory of other kinds; each is packed as it is
        read."""
        if self.new_head and self.head is None:
            raise CheckpointError(
                "the folder holds no score head", where=str(self.path), fix="train one with stage: RM or CLS"
            )
        self.check_names()
        model = self.meta()
        self.check_shapes(model)
        dtype = dtype or self.dtype()
        self.spec.cast(model, dtype)
        if store is not None:
            store(model)
        model.to_empty(device=device)
        state, packed = model.state_dict(), packed_layers(model)
        with torch.no_grad():
            for entry in self.entries():
                holder = packed.get(entry.ours.removesuffix(".weight"))
                if holder is not None:
                    holder.pack(self.read(entry).to(device, dtype))
                elif not entry.copy_of:
                    state.pop(entry.ours).copy_(self.read(entry))
        assert not state, f"no weight-name entry fills {sorted(state)}"
        if self.quantised:
            install_scales(model, self)
        return model


def _or_names(spec: ModelSpec) -> str:
    """Of a family that another package brings, the names may be wrong, rather than the folder."""
    brought = MODELS.distribution(spec.name)
    return f"; or `names` of {spec.name} ({brought}) does not fit such folders" if brought else ""


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from an index or from the files' own headers."""
    listed = Listed(path)
    index = path / "model.safetensors.index.json"
    if listed.has(index.name):
        return _indexed(index, listed)
    whole = path / "model.safetensors"
    singles = [whole] if listed.has(whole.name) else listed.glob("model*.safetensors")
    if not singles:
        other = sorted(p.name for p in path.glob("*") if p.suffix in (".bin", ".pt", ".pdparams", ".pdiparams"))
        raise CheckpointError(
            "no .safetensors weights" + (f", only {other[0]}, which can run code when opened" if other else ""),
            where=str(path),
            fix="use the safetensors release of this model" if other else "check model_name_or_path",
        )
    found: dict[str, Path] = {}
    for file in singles:
        for name in check_safetensors(file).tensors:
            if name in found:
                raise CheckpointError(
                    f"{name} is both in {found[name].name} and in {file.name}",
                    where=str(path),
                    fix="files of two models lie in this folder: move one of them away",
                )
            found[name] = file
    return found


def _indexed(index: Path, listed: Listed) -> dict[str, Path]:
    """What an index names, all of it inside the folder and there."""
    path, weights = index.parent, read_json(index, _MAX_INDEX).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index.name} has no weight_map", where=str(path), fix="download it again")
    strange = [f for f in weights.values() if not isinstance(f, str) or not f]
    if strange:
        what = f"the index names {str(strange[0])[:60]!r} where a file's name belongs"
        raise CheckpointError(what, where=str(index), fix=_AGAIN)
    names = sorted(set(weights.values()))
    outside = next((n for n in names if Path(n).is_absolute() or ".." in Path(n).parts), None)
    if outside is not None:
        raise CheckpointError(f"the index names a file outside the folder: {outside}", where=str(index), fix=_AGAIN)
    other = next((n for n in names if not n.endswith(".safetensors")), None)
    if other is not None:
        raise CheckpointError(f"the index names {other[:60]}, no .safetensors file", where=str(index), fix=_AGAIN)
    missing = [Path(name).name for name in names if not listed.has(name)]
    if missing:
        raise CheckpointError(
            counted(len(missing), "file named in the index is missing", "files named in the index are missing")
            + f": {', '.join(missing[:3])}",
            where=str(index),
            fix="finish the download, or copy the files of the other nodes here",
        )
    files = {name: path / name for name in names}
    return {name: files[file] for name, file in weights.items()}


def _open_file(file: Path) -> Any:
    refuse_special(file, CheckpointError)
    try:
        check_safetensors(file)  # the library accepts some wrong headers, and takes any system error for a missing file
        return safe_open(str(file), framework="pt")
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(file, error) from error
    except Exception as error:  # the library raises its own untyped errors for damaged headers
        raise CheckpointError(f"{file.name} is damaged: {error}", where=str(file), fix="download it again") from None
