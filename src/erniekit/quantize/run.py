"""A model folder -> the same model quantised: layer by layer, resumable, checked before it appears.

Called by recipes/quantize.py, which turns keys into a QuantiseJob. One decoder layer is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.identity import model_identity
from erniekit.checkpoint.model_folder import SIDE_FILES, ModelFolder
from erniekit.checkpoint.model_writer import copy_side_files
from erniekit.checkpoint.writer import publish, require_space
from erniekit.data.types import Batch
from erniekit.errors import CheckpointError
from erniekit.export.target import QUANTIZE, check_replaceable, check_target, one_export
from erniekit.export.verify import default_ids, same_tensors
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.printable import counted
from erniekit.quant_schemes import QuantRecipe
from erniekit.quantize.file_parts import Parts, weight_from
from erniekit.quantize.fp8_static import served
from erniekit.quantize.layer_weights import LayerResult, LayerWeights, Method, is_quantised, require_finite
from erniekit.quantize.model_files import LAYOUT, layer_of, write_weights
from erniekit.quantize.report import report_facts, write_report
from erniekit.quantize.streams import OneLayer, Quality, Streams
from erniekit.quantize.work_folder import WorkFolder

PROBE_TOKENS = 64


@dataclass(frozen=True)
class QuantiseJob:
    source: Path
    out: Path
    quant: str  # name of the recipe, for people
    recipe: QuantRecipe  # fitted to the model (fit.py)
    method: Method
    device: torch.device
    dtype: torch.dtype  # layers are computed in
    calibrating: Sequence[Batch] = ()
    measuring: Sequence[Batch] = ()  # none: quality is measured on the rows that calibrated
    tokenizer: Path | None = None  # the folder whose tokenizer goes with it
    max_shard_size: float = 5.0

    @property
    def method_name(self) -> str:
        if self.recipe.rest.number == "nf4":
            return "round to nearest"
        return "error-compensating (GPTQ)" if self.method.compensate else "round to nearest"


def quantise(job: QuantiseJob) -> dict[str, Any]:
    """Writes job.out; returns the facts of its report."""
    source = ModelFolder(job.source)
    source.check_names()
    source.check_shapes(source.meta())
    check_target(job.out, [job.source], QUANTIZE)
    with one_export(job.out):
        check_target(job.out, [job.source], QUANTIZE)
        work = WorkFolder(job.out, _identity(job))
        run = _Quantisation(job, source, work)
        quality = run.layers()
        facts = run.publish(quality)
        work.clear()
    return facts


class _Quantisation:
    def __init__(self, job: QuantiseJob, source: ModelFolder, work: WorkFolder) -> None:
        self.job, self.source, self.recipe, self.work = job, source, job.recipe, work
        self.expected = 0  # bytes of the result
        self.before = sum(file.stat().st_size for file in set(source.files.values()))
        self.dtype = source.dtype()  # of the weights the files represent
        self.entries: dict[int, dict[str, Any]] = {}  # by layer, then by names inside it, in the layout that is written
        for entry in source.spec.names(source.config, LAYOUT):
            number, inside = layer_of(entry.ours)
            if number >= 0:
                self.entries.setdefault(number, {})[inside] = entry

    def layers(self) -> Quality | None:
        one = OneLayer(self.source, self.job.device, self.job.dtype)
        for name, entry in one.entries.items():  # what stays as it is, before hours of work on the rest
            if not is_quantised(layer_of(name)[1]):
                require_finite(entry, self.source.read(entry), str(self.job.source))
        done = self.work.open()
        sizes = [self._size(one, number) for number in range(len(self.entries))]
        # Layers are kept until the result is there, and it holds them once more.
        self.expected = max(0, self.before - sum(sizes) * self.dtype.itemsize) + self._packed(sizes)
        require_space(self.job.out.parent, self.job.out.name, self.expected + self._packed(sizes[done:]))
        streams = Streams(one, self.job.calibrating, self.job.measuring) if self.job.calibrating else None
        with _bar(sum(sizes), sum(sizes[:done])) as advance:
            for number in range(len(self.entries)):
                self._layer(one, streams, number, number < done, advance)
        return streams.quality() if streams is not None else None

    def _layer(
        self, one: OneLayer, streams: Streams | None, number: int, done: bool, advance: Callable[[int], object]
    ) -> None:
        if done and streams is None:
            return
        layer = one.open(number) if streams is not None else None
        if done:
            result = LayerResult(self.work.parts(number))
        else:
            inputs = streams.watch(layer, hessians=True) if streams is not None and layer is not None else None
            weights = LayerWeights(
                number, self.entries[number], partial(one.read, number), self.recipe, self.job.method, self.job.device,
                advance,
            )  # fmt: skip
            result = weights.quantise(inputs)
        plain = self._plain(number, result.parts)
        if streams is not None and layer is not None:
            streams.advance_plain(layer)
            one.fill(layer, plain)
            streams.advance_quantised(layer, self.recipe, self._input_scales(number, result.parts))
            result.facts["drift"] = streams.drift()
            one.close(number)
        if not done:
            result.facts["digests"] = {name: _digest(weight) for name, weight in plain.items()}
            self.work.save(number, result.parts, result.facts)

    def _plain(self, number: int, parts: Parts) -> dict[str, torch.Tensor]:
        """The layer's weights, as a program that loads the result gets them."""
        out = {}
        for name, entry in self.entries[number].items():
            if not is_quantised(name):
                continue
            try:
                out[name] = weight_from(entry, parts, self._scheme(name), self.dtype)
                finite = bool(torch.isfinite(out[name]).all())
            except CheckpointError:  # scales that no reader takes
                finite = False
            if not finite:
                raise CheckpointError(
                    f"layers.{number}.{name} holds numbers too large for {self.job.quant}",
                    where=str(self.job.source),
                    fix="quant=w8a16 has a scale for each row; or look at the model: `erniekit eval` gives its loss",
                )
        return out

    def _scheme(self, name: str) -> Any:
        return self.recipe.experts if name.startswith("mlp.experts.") else self.recipe.rest

    def _input_scales(self, number: int, parts: Parts) -> dict[str, torch.Tensor]:
        stored = {name: f"{entry.theirs[0].removesuffix('weight')}input_scale" for name, entry in
                  self.entries[number].items()}  # fmt: skip
        return {name: parts[part] for name, part in stored.items() if part in parts}

    def _size(self, one: OneLayer, number: int) -> int:
        state = one.model.get_submodule(f"layers.{number}").state_dict()
        return sum(weight.numel() for name, weight in state.items() if is_quantised(name))

    def _packed(self, sizes: Sequence[int]) -> int:
        """Bytes of this many weights; a bit of each for scales."""
        return sum(sizes) * (max(scheme.bits for scheme in self.recipe.schemes) + 1) // 8

    def publish(self, quality: Quality | None) -> dict[str, Any]:
        job = self.job
        layers = [self.work.facts(number) for number in range(len(self.entries))]
        facts: dict[str, Any] = {}

        def write(folder: Path) -> None:
            copy_side_files(job.source, folder, SIDE_FILES)
            if job.tokenizer is not None:
                copy_side_files(job.tokenizer, folder, TOKENIZER_FILES)
            write_weights(folder, self.source, self.recipe, self.work.parts, job.max_shard_size)
            self._prove(folder, layers)
            after = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
            facts.update(
                report_facts(
                    source=str(job.source), quant=job.quant, recipe=self.recipe, method=job.method_name,
                    moe=self.source.config.moe is not None, layers=layers, quality=quality,
                    measured_on=self._measured_on(), rows=_documents(job.calibrating), bytes_before=self.before,
                    bytes_after=after, expert_tokens=job.method.expert_tokens,
                )
            )  # fmt: skip
            write_report(folder, facts)

        info = {"base": str(job.source), "quant": job.quant, "method": job.method_name, "layout": LAYOUT}
        replaceable = partial(check_replaceable, command=QUANTIZE)
        publish(job.out.parent, job.out.name, write, info=info, expected_bytes=self.expected, may_replace=replaceable)
        return facts

    def _measured_on(self) -> str:
        if self.job.measuring:
            return counted(_documents(self.job.measuring), "evaluation row")
        calibrated = counted(_documents(self.job.calibrating), "calibration row itself", "calibration rows themselves")
        return f"the {calibrated}; eval_dataset_path names others"

    def _prove(self, folder: Path, layers: Sequence[dict[str, Any]]) -> None:
        """Every weight reads as it was calibrated, every other tensor as in the source; then a probe for later."""
        written = ModelFolder(folder)
        changed = {f"layers.{k}.{name}" for k, facts in enumerate(layers) for name in facts["digests"]}
        same_tensors(self.source, written, changed)
        for entry in written.entries():
            number, inside = layer_of(entry.ours)
            if entry.ours in changed and _digest(written.read(entry)) != layers[number]["digests"][inside]:
                raise CheckpointError(
                    f"{entry.ours} changed while it was copied to the new folder; nothing was published",
                    where=str(folder),
                    fix="check the disk and the memory of this machine, then quantise again",
                )
        with torch.no_grad():
            probes.save(folder, probes.measure(served(written), self._probe(), _setting()))

    def _probe(self) -> probes.Probe:
        """The source's own tokens, else some of the first row."""
        saved = probes.load(self.job.source, self.source.config)
        if saved is not None:
            return saved
        if self.job.calibrating:
            return probes.probe_from(self.job.calibrating[0], PROBE_TOKENS)
        ids = default_ids(self.source.config.vocab_size)
        return probes.Probe(ids, ids.roll(-1))


def _documents(rows: Sequence[Batch]) -> int:
    """Rows as a person counts them: short ones share a sequence, and a pair is two segments of it."""
    return sum(row.pairs.count if row.pairs is not None else len(row.cu_seqlens) - 1 for row in rows)


def _setting() -> str:
    return f"cpu/float32/{torch.__version__}/one device"


def _identity(job: QuantiseJob) -> dict[str, Any]:
    """Everything that decides the bytes of a layer."""
    rows = hashlib.sha256()
    for row in job.calibrating:
        rows.update(row.input_ids.numpy().tobytes() + row.cu_seqlens.numpy().tobytes() + b"|")
    for row in job.measuring:
        rows.update(row.input_ids.numpy().tobytes() + row.labels.numpy().tobytes() + b";")
    return {
        "version": 1,
        "model": model_identity(job.source),
        "recipe": asdict(job.recipe),
        "method": asdict(job.method),
        "rows": rows.hexdigest(),
        "computed": [str(job.device.type), str(job.dtype), torch.__version__],
    }


def _digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[int], object]]:
    # disable=None: no bar in a pipe or a log file.
    with tqdm(
        total=total, initial=done, desc="quantize", unit=" weights", unit_scale=True, disable=None, leave=False
    ) as bar:
        yield bar.update
