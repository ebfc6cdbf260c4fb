"""`erniekit export`: a run's weights as one model folder for any program, LoRA merged, proven before it appears.

Called by cli/main.py (export_command), the API (run_export) and the demo (export). Streams: one shard in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.hub import resolve_model
from erniekit.checkpoint.model_folder import SIDE_FILES, TOKENIZER_FILES, ModelFolder, read_json
from erniekit.checkpoint.model_writer import copy_side_files, write_model
from erniekit.checkpoint.probe import Probe
from erniekit.checkpoint.writer import publish
from erniekit.config import RunConfig, load, need
from erniekit.errors import CheckpointError
from erniekit.export.source import find_source
from erniekit.export.target import check_replaceable, check_target, one_export
from erniekit.export.verify import Proof, prove
from erniekit.log import paint, say, warn
from erniekit.lora import paddle_files, peft_files
from erniekit.lora.adapter import Adapter
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.merge import RowUpdate, merged_in_fp32, row_updates
from erniekit.result import RunResult


def export_command(args: list[str]) -> int:
    run_export(load(args, "export"))
    return 0


def run_export(cfg: RunConfig, command: Sequence[str] = ()) -> RunResult:
    """<output_dir>/export: the adapter found there merged into model_name_or_path, or the fully trained model again."""
    need(cfg, "output_dir")
    output_dir = Path(str(cfg.train.output_dir)).expanduser()
    source = find_source(output_dir)
    if source is None:
        raise CheckpointError(
            "neither an adapter nor a model in this folder or in a checkpoint-N inside it",
            where=f"output_dir: {output_dir}",
            fix="set output_dir to the folder a training run wrote to",
        )
    adapter = source.path if source.is_adapter else None
    base = _base_of(cfg, adapter) if adapter else source.path
    return result_of(
        export(
            base,
            adapter,
            output_dir / "export",
            layout=cfg.checkpoint.save_format,
            max_shard_size=cfg.export.max_shard_size,
            copy_tokenizer=cfg.export.copy_tokenizer,
            probe=_probe_of(source.path),
        )
    )


def _probe_of(folder: Path) -> Probe | None:
    """None for one taken over frozen weights in fp8: the stored ones, which are exported, do not repeat it, and the
    merge's own proof has to do."""
    probe = probes.load(folder)
    return None if probe is None or probe.setting.endswith(probes.FP8_BASE) else probe


def result_of(folder: Path) -> RunResult:
    commands = [f"erniekit chat {folder}"]
    say(paint(f"next     {commands[0]}", "bold"))
    return RunResult(folder, next_commands=commands)


def export(
    base: Path,
    adapter: Path | None,
    out: Path,
    *,
    layout: str = "hf",
    max_shard_size: float = 5.0,
    copy_tokenizer: bool = True,
    verify: bool = True,
    probe: Probe | None = None,
) -> Path:
    """`out` with base + adapter merged (or base rewritten) in `layout`, shards of at most max_shard_size GB.

    It appears whole and proven, or not at all. `probe`: a saved answer the result must give as well.
    """
    sources = [base, *([adapter] if adapter else [])]
    check_target(out, sources)
    source = _Watched(base)
    source.check_names()
    model = source.meta()
    source.check_shapes(model)
    loaded = read_adapter(adapter, model) if adapter else None
    updates = row_updates(model, loaded) if loaded else {}
    size = sum(file.stat().st_size for file in set(source.files.values()))
    info: dict[str, Any] = {"base": str(base), "adapter": str(adapter) if adapter else None, "layout": layout}
    merge = _Merge(source, updates)
    proofs: list[Proof] = []

    def write(folder: Path) -> None:
        copy_side_files(base, folder, SIDE_FILES + (TOKENIZER_FILES if copy_tokenizer else ()))
        # Read once to write; then both folders to compare, and both again to run them.
        reads = 1 if not verify else 3 if loaded is None else 5
        with _bar(reads * size, "export") as source.advance:
            write_model(folder, source.config, merge.get, layout=layout, max_shard_size=max_shard_size)
            if verify:
                written = _Watched(folder)
                written.advance = source.advance
                proofs.append(prove(source, loaded, written, set(updates), probe))
                info["proof"] = vars(proofs[0])

    with one_export(out):
        check_target(out, sources)
        publish(out.parent, out.name, write, info=info, expected_bytes=size, may_replace=check_replaceable)
    _tell(out, loaded, merge, proofs, layout)
    return out


class _Watched(ModelFolder):
    """Tells a progress bar how many bytes were read."""

    advance: Callable[[int], object] = staticmethod(lambda size: None)

    def tensor(self, name: str) -> torch.Tensor:
        out = super().tensor(name)
        self.advance(out.numel() * out.element_size())
        return out


class _Merge:
    """Our tensor names -> the tensors to write, one at a time; keeps count of what rounding costs the update."""

    def __init__(self, source: ModelFolder, updates: dict[str, list[RowUpdate]]) -> None:
        self.source, self.updates = source, updates
        self.entries = {entry.ours: entry for entry in source.entries() if not entry.copy_of}
        self._rounded = self._added = 0.0  # sums of squares

    def get(self, name: str) -> torch.Tensor:
        weight = self.source.read(self.entries[name])
        if name not in self.updates:
            return weight
        exact = merged_in_fp32(weight, self.updates[name])
        out = exact.to(weight.dtype)
        if weight.dtype != torch.float32:
            self._rounded += float((out.float() - exact).square().sum())
            self._added += float((exact - weight.float()).square().sum())
        return out

    def lost(self) -> float:
        """Size of the rounding error relative to the update it was added with."""
        return (self._rounded / self._added) ** 0.5 if self._added else 0.0


def _base_of(cfg: RunConfig, adapter: Path) -> Path:
    """model_name_or_path, else the base the adapter's own config names."""
    named = cfg.model.model_name_or_path
    if not named:
        config = next(f for f in (peft_files.CONFIG, paddle_files.CONFIG) if (adapter / f).is_file())
        named = read_json(adapter / config).get("base_model_name_or_path")
    return resolve_model(named, cfg.model.download_hub)


@contextmanager
def _bar(size: int, what: str) -> Iterator[Callable[[int], object]]:
    # disable=None: no bar where nobody watches (a pipe, a log file).
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


def _tell(out: Path, adapter: Adapter | None, merge: _Merge, proofs: list[Proof], layout: str) -> None:
    if adapter is not None:
        say(f"merged   {len(adapter.updates)} projections of {adapter.where} into {merge.source.path}, in fp32")
    if merge.lost() > 0.5:
        warn(
            f"rounding to {str(merge.source.dtype()).removeprefix('torch.')} changes the update by {merge.lost():.0%} "
            "of its size: it is too small for this dtype; serve base + adapter, or train longer"
        )
    for proof in proofs:
        for line in proof.lines(merged=adapter is not None):
            say(f"checked  {line}")
    shards = sorted(out.glob("model*.safetensors"))
    size = sum(f.stat().st_size for f in shards)
    shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    say(f"saved    {out} ({layout} layout, {len(shards)} file{'s' if len(shards) > 1 else ''}, {shown})")
