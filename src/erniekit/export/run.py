"""`erniekit export`: a run's weights as one model folder for any program, LoRA merged, proven before it appears.

Called by recipes/run.py (run_export), recipes/quantize.py and the demo (export). Streams: one shard in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import PREPROCESSOR, SIDE_FILES, ModelFolder, read_json
from erniekit.checkpoint.model_writer import copy_side_files, processor_files, write_model, written_layout
from erniekit.checkpoint.probe import Probe
from erniekit.checkpoint.release_code import missing_code
from erniekit.checkpoint.writer import publish
from erniekit.config import RunConfig, need
from erniekit.data.settings_files import read_settings
from erniekit.data.tokenizer import has_tokenizer, load_tokenizer
from erniekit.data.vision import proof_file
from erniekit.data.vision.proof_file import Proved
from erniekit.data.vision.rules import VisionRules
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export import card
from erniekit.export.gguf.chat import create_command
from erniekit.export.gguf.proof import GgufProof, prove_gguf
from erniekit.export.gguf.run import gguf_plan, write_gguf
from erniekit.export.plan import ExportPlan, note_unread, plan_of, tokenizer_of
from erniekit.export.streamed import streamed
from erniekit.export.target import check_replaceable, check_target, one_export
from erniekit.export.verify import Proof, prove
from erniekit.export.vision_ids import with_token_ids
from erniekit.files.listed import has_file
from erniekit.files.part_file import part_file
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.log import emit, paint, typed, warn
from erniekit.lora.adapter import Adapter, combined
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.base import check_answers, same_base, stored_probe, trained_over
from erniekit.lora.frozen_base import on_grid
from erniekit.lora.merge import WeightUpdate, merged_in_fp32, row_updates
from erniekit.lora.score_head import head_on
from erniekit.models.family_check import check_names
from erniekit.models.names import Entry
from erniekit.models.score_head import labels_in
from erniekit.printable import counted
from erniekit.result import RunResult
from erniekit.weight_kinds import BF16

SHOWN = 5  # tensors that hold something else than numbers
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def run_export(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    """Adapters merged into their base, or a fully trained model again: see plan.py for what the keys mean."""
    need(cfg, "output_dir")
    note_unread(cfg)
    plan = plan_of(cfg)
    gguf = cfg.export.gguf_type if cfg.export.format == "gguf" else ""
    return result_of(
        export(
            plan.base,
            plan.adapters,
            plan.out,
            layout=cfg.checkpoint.save_format,
            max_shard_size=cfg.export.max_shard_size,
            copy_tokenizer=cfg.export.copy_tokenizer,
            tokenizer=plan.tokenizer,
            override_base=cfg.lora.override_base,
            probe=_probe_of(plan, cfg.lora.override_base),
            grid=cfg.export.merge_grid,
            gguf=gguf,
        ),
        gguf,
    )


def _probe_of(plan: ExportPlan, override_base: bool) -> Probe | None:
    """The saved logits the result must give; there are none for several adapters, or one on another base."""
    if not plan.adapters:
        return probes.load(plan.base)
    return None if override_base or len(plan.adapters) > 1 else stored_probe(plan.adapters[0])


def result_of(folder: Path, gguf: str = "") -> RunResult:
    if gguf:
        commands = [create_command(folder)]
    elif classes := labels_in(read_json(folder / "config.json"), str(folder)):
        stage = "stage=RM" if len(classes) == 1 else "stage=CLS"
        commands = [typed("eval", folder, stage, "eval_dataset_path=FILE")]
    else:
        commands = [typed("chat", folder)]
    emit(paint(f"next     {commands[0]}", "bold"))
    return RunResult(folder, next_commands=commands)


def export(
    base: Path,
    adapters: Path | Sequence[Path] | None,
    out: Path,
    *,
    layout: str = "hf",
    max_shard_size: float = 5.0,
    copy_tokenizer: bool = True,
    tokenizer: Path | None = None,
    override_base: bool = False,
    verify: bool = True,
    probe: Probe | None = None,
    grid: str = BF16,
    gguf: str = "",
) -> Path:
    """`out` with base + adapters merged (or base rewritten) in `layout`, shards of at most max_shard_size GB; or as one
    GGUF file of the type `gguf`.

    It appears whole and proven, or not at all. tokenizer: the folder whose tokenizer goes with it; the adapters', else
    the base's when not given. override_base: the adapters may have been trained on another base. `probe`: saved
    logits the result must give as well. grid: the frozen_base whose numbers merged weights are rounded to; the result
    then differs from base + adapter and from the probe, and is not compared.
    """
    folders = (adapters,) if isinstance(adapters, Path) else tuple(adapters or ())
    rounded = grid != BF16
    if rounded and not folders:
        raise no_adapter(grid)
    if rounded and gguf:
        raise ConfigError(
            f"merge_grid: {grid} and format: gguf each round weights in a way of their own",
            where="merge_grid and format",
            fix="leave merge_grid out",
        )
    for folder in folders if rounded else ():
        if (trained := trained_over(folder)) not in (None, grid):
            warn(f"{folder} was trained over frozen_base: {trained}; merge_grid: {grid} puts it on other numbers")
    check_target(out, [base, *folders])
    changes, head = head_on(base, folders)
    source = _Watched(base, changes=changes, head=head)
    source.check_names()
    model = source.meta()
    source.check_shapes(model)
    if not gguf:
        check_names(source.spec, source.config, written_layout(source.config, layout), model)
    loaded = [read_adapter(folder, model) for folder in folders]
    if not override_base:
        _check_bases(source, folders, loaded)
    if tokenizer is None and (copy_tokenizer or gguf):
        tokenizer = tokenizer_of(base, folders)
    # Before anything is merged, and from the folder that is the user's: the copy that is checked is deleted by then.
    proof_in = next((place for place in (*reversed(folders), base) if has_file(place, proof_file.FILE)), base)
    if verify and not gguf:
        proof_file.load(proof_in)
    updates = row_updates(model, *loaded)
    whole = combined(loaded) if loaded else None
    size = sum(file.stat().st_size for file in set(source.files.values()))
    info: dict[str, Any] = {"base": str(base), "adapters": [str(folder) for folder in folders], "layout": layout}
    if gguf:
        info["gguf"] = gguf
    if rounded:
        info["merge_grid"] = grid
        whole = probe = None
    if source.quantised:
        static = any(weight.scheme.static_inputs for weight in source.quantised.values())
        emit("note     the weights are quantised: they are written dequantised" + (", and inputs unrounded" * static))
        probe = None if static and not folders else probe  # it was measured with rounded inputs
    config = source.config
    if probe is not None:
        probes.require_fit(probe, config, folders[0] if folders else base)
    if config.vision is not None:
        config = with_token_ids(config, tokenizer or tokenizer_of(base, folders))
    as_gguf = gguf_plan(source, tokenizer or base, gguf) if gguf else None
    merge = _Merge(source, updates, grid, rounded=as_gguf is None)
    proofs: list[Proof | GgufProof] = []
    proved: list[Proved | None] = []

    def write_file(folder: Path) -> None:
        assert as_gguf is not None
        with _bar((2 if verify else 1) * size, "export") as source.advance:
            written = write_gguf(as_gguf, folder, merge.get, out.name)
            if verify:
                proofs.append(prove_gguf(source, whole, written, probe))
                info["proof"] = vars(proofs[0])
        with part_file(folder / card.FILE) as page:
            page.write(card.model_card(out.name, base, folders, gguf))

    def write(folder: Path) -> None:
        for place in (base, *folders):  # an adapter's own goes before its base's
            vision_files = processor_files(place) if source.config.vision is not None else ()
            copy_side_files(place, folder, (*SIDE_FILES, *vision_files, proof_file.FILE))
        if copy_tokenizer and tokenizer is not None:
            copy_side_files(tokenizer, folder, TOKENIZER_FILES)
        # Read once to write; then both folders to compare, and both again to run them.
        reads = 1 if not verify else 3 if whole is None else 5
        with _bar(reads * size, "export") as source.advance:
            write_model(folder, config, merge.get, layout=layout, max_shard_size=max_shard_size)
            if verify:
                written = _Watched(folder)
                written.advance = source.advance
                proofs.append(prove(source, whole, written, set(updates), probe))
                if not rounded:
                    info["proof"] = vars(proofs[0])
                proved.append(_prove_pixels(folder, proof_in))
        told = card.model_card(out.name, base, folders, classes=config.labels)
        with part_file(folder / card.FILE) as page:
            page.write(told)
        # Its rows are training data: an export is what people publish.
        (folder / proof_file.FILE).unlink(missing_ok=True)

    with one_export(out):
        check_target(out, [base, *folders])
        made, needed = (write, size) if as_gguf is None else (write_file, as_gguf.size)
        publish(out.parent, out.name, made, info=info, expected_bytes=needed, may_replace=check_replaceable)
    _show_result(out, source, loaded, merge, proofs, f"{layout} layout" if as_gguf is None else as_gguf.kind.name)
    if config.vision is not None and as_gguf is None and layout == "hf" and (lacking := missing_code(out)):
        emit(
            f"note     vLLM reads it with Python files of its release; missing: {', '.join(lacking)} (docs/ernie-vl.md)"
        )
    for each in filter(None, proved):
        (emit if each.stage is None else warn)(f"checked  {each.line()}" if each.stage is None else each.line())
    return out


def no_adapter(grid: str) -> ConfigError:
    return ConfigError(
        f"merge_grid: {grid} rounds merged weights; there is no adapter to merge",
        where="merge_grid",
        fix="leave it out",
    )


def _prove_pixels(folder: Path, proof_in: Path) -> Proved | None:
    """Rows that the checkpoint keeps, made again by what the folder brings along. A stage that the folder decides must
    be as in training; libraries of this machine are only reported. proof_in: where the rows are from."""
    if not has_tokenizer(folder):
        return None
    proved = proof_file.check(folder, load_tokenizer(folder))
    if proved is not None and proved.of_folder:
        raise CheckpointError(
            f"{proved.line()}; nothing was published",
            where=str(proof_in / proof_file.FILE),
            fix="export with the tokenizer the model was trained with: leave tokenizer_name out",
        )
    if proved is not None and (folder / PREPROCESSOR).is_file():
        sizes = VisionRules.sizes_of(read_settings(folder / PREPROCESSOR))
        for name, (now, trained) in proof_file.other_sizes(folder, sizes).items():
            warn(f"{PREPROCESSOR} says {name} {now:,}, trained with {trained:,}: a server would see other sizes")
    return proved


def _check_bases(source: ModelFolder, folders: Sequence[Path], adapters: Sequence[Adapter]) -> None:
    """Each adapter by itself on this base, before anything is written. A single one whose base has the right weights,
    or has no record of them, is checked in the proof of the result."""
    for folder, adapter in zip(folders, adapters):
        if len(folders) == 1 and same_base(folder, source.path) is not False:
            return

        @torch.no_grad()
        def answer(ids: torch.Tensor, adapter: Adapter = adapter, **more: Any) -> torch.Tensor:
            logits: torch.Tensor = streamed(source, adapter)(ids, **more)
            return logits

        check_answers(folder, source.path, answer, source.dtype(), source.config)


class _Watched(ModelFolder):
    """Passes to a progress bar how many bytes were read, and counts what is no number."""

    advance: Callable[[int], object] = staticmethod(lambda size: None)

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._not_finite: dict[str, tuple[int, int]] = {}  # stored tensor -> values that are NaN or infinite, all

    def tensor(self, name: str) -> torch.Tensor:
        out = self.slices().read(name)  # a plain read: pages of a mapping count as memory
        self.advance(out.numel() * out.element_size())
        if name not in self._not_finite and out.dtype in _FLOATS:
            # A sum needs no memory. It is finite unless a value is not, or values are huge: then each is looked at.
            finite = math.isfinite(float(out.sum(dtype=torch.float32)))
            self._not_finite[name] = (0 if finite else int((~out.isfinite()).sum()), out.numel())
        return out

    def not_finite(self) -> list[str]:
        """A line for each of the first tensors that hold such values, and one for the others."""
        found = [(name, bad, of) for name, (bad, of) in self._not_finite.items() if bad]
        lines = [f"{name} holds {bad:,} of {of:,} values that are NaN or infinite" for name, bad, of in found[:SHOWN]]
        more = len(found) - SHOWN
        return lines + ([f"and so {counted(more, 'more tensor does', 'more tensors do')}"] if more > 0 else [])

    def fill(self, entry: Entry, out: torch.Tensor, first: int = 0) -> None:
        before = self.slices().bytes_read
        super().fill(entry, out, first)
        self.advance(self.slices().bytes_read - before)


class _Merge:
    """Our tensor names -> the tensors to write, one at a time; keeps count of what rounding costs the update.

    grid: whose numbers merged weights are; rounded: to the dtype of the base; else they stay fp32."""

    def __init__(
        self, source: ModelFolder, updates: dict[str, list[WeightUpdate]], grid: str = BF16, rounded: bool = True
    ) -> None:
        self.source, self.updates, self.grid, self.rounded = source, updates, grid, rounded
        self.entries = {entry.ours: entry for entry in source.entries() if not entry.copy_of}
        self._rounded = self._added = 0.0  # sums of squares

    def get(self, name: str) -> torch.Tensor:
        weight = self.source.read(self.entries[name])
        if name not in self.updates:
            return weight
        if self.grid != BF16:
            weight = on_grid(self.grid, name, weight)
        exact = merged_in_fp32(weight, self.updates[name])
        # Packed as the dtype that is written, so that who packs what is read finds the same numbers.
        out = exact if self.grid == BF16 else on_grid(self.grid, name, exact.to(weight.dtype))
        if self.rounded:
            out = out.to(weight.dtype)
        if self.grid != BF16 or (self.rounded and weight.dtype != torch.float32):
            self._rounded += float((out.float() - exact).square().sum())
            self._added += float((exact - weight.float()).square().sum())
        return out

    def lost(self) -> float:
        """Size of the rounding error relative to the update it was added with."""
        return (self._rounded / self._added) ** 0.5 if self._added else 0.0


@contextmanager
def _bar(size: int, what: str) -> Iterator[Callable[[int], object]]:
    # disable=None: no bar in a pipe or a log file.
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


def _show_result(
    out: Path,
    source: _Watched,
    adapters: Sequence[Adapter],
    merge: _Merge,
    proofs: Sequence[Proof | GgufProof],
    what: str,
) -> None:
    for line in source.not_finite():
        warn(f"{line}, in {source.path} as in the export")
    for adapter in adapters:
        changed = counted(len(adapter.updates), "projection")
        emit(f"merged   {changed} of {adapter.where} into {merge.source.path}, in fp32")
    rounded = merge.grid != BF16
    if rounded:
        emit(f"rounded  merged weights to what {merge.grid} keeps: {merge.lost():.0%} of the update's size is lost")
    if merge.lost() > 0.5:
        kind, target, instead = merge.grid, "grid", "leave merge_grid out"
        if not rounded:
            kind, target, instead = str(merge.source.dtype()).removeprefix("torch."), "dtype", "train longer"
        warn(
            f"rounding to {kind} changes the update by {merge.lost():.0%} of its size: it is too small for this "
            f"{target}; serve base + adapter, or {instead}"
        )
    for proof in proofs:
        merged = "" if not adapters else "adapter" if len(adapters) == 1 else f"{len(adapters)} adapters"
        for line in ["every other tensor bit-identical to its source"] if rounded else proof.lines(merged):
            emit(f"checked  {line}")
    shards = [*out.glob("model*.safetensors"), *out.glob("model*.gguf")]
    size = sum(f.stat().st_size for f in shards)
    shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    emit(f"saved    {out} ({what}, {counted(len(shards), 'file')}, {shown})")
