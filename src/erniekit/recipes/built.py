"""Built: a model spread over the ranks, and what belongs to it. Made once by build.py, frozen; read by savers.

It is what a plan cannot know: the parts of the model that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from erniekit.checkpoint.assembly import ModelFiles
from erniekit.checkpoint.collective import SavedTensors
from erniekit.checkpoint.hub import lasting_name
from erniekit.checkpoint.identity import write_base
from erniekit.checkpoint.model_folder import GENERATION_FILES, PREPROCESSOR, SIDE_FILES, ModelFolder
from erniekit.checkpoint.model_writer import (
    copy_side_files,
    files_of,
    processor_files,
    write_generation_config,
    write_model,
    write_settings,
)
from erniekit.devices.base import Device
from erniekit.files.tokenizer_names import TOKENIZER_FILES
from erniekit.lora.inject import in_adapter
from erniekit.lora.settings import LoRASettings
from erniekit.lora.together import adapter_files, write_run_adapter
from erniekit.parallel.engine import Engine
from erniekit.parallel.gradients import local
from erniekit.parallel.mesh import World
from erniekit.parallel.packed_shards import is_packed_bytes
from erniekit.parallel.sharding import Sharding
from erniekit.parallel.sharding_table import plain
from erniekit.recipes import weights
from erniekit.recipes.run_plan import RunPlan


@dataclass(frozen=True)
class Built:
    plan: RunPlan
    whole: nn.Module  # the unspread model on the meta device: names and structure only
    engine: Engine
    sharding: Sharding
    base: str = ""  # identity of the model in `folder`; of one from scratch: of its config and seed

    @property
    def folder(self) -> ModelFolder:
        return self.plan.folder

    @property
    def world(self) -> World:
        return self.plan.world

    @property
    def device(self) -> Device:
        return self.plan.device

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.dtype

    @property
    def lora(self) -> LoRASettings | None:
        return self.plan.lora

    @property
    def mtp_tokens(self) -> int:
        """Further tokens that are trained."""
        return self.plan.mtp_tokens

    @property
    def base_name(self) -> str:
        """Stored with adapters: the folder's absolute path, or its hub id."""
        return lasting_name(str(self.plan.config.model.model_name_or_path), self.folder.path)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of all this rank holds, each once; packed weights are none."""
        seen: set[int] = set()
        for part in self.engine.parts:
            for name, param in part.named_parameters():
                if id(param) not in seen and not is_packed_bytes(name):
                    seen.add(id(param))
                    yield plain(name), param

    def trainable(self) -> int:
        return sum(p.numel() for p in self.whole.parameters() if p.requires_grad)

    def total(self) -> int:
        return sum(p.numel() for p in self.whole.parameters())

    # What the saver needs: this rank's pieces of what a checkpoint holds, and both ways of its format.

    def saved_names(self) -> list[str]:
        return [n for n in self.sharding.names() if in_adapter(n)] if self.lora else self.sharding.names()

    def pieces(self) -> dict[str, torch.Tensor]:
        wanted = set(self.saved_names())
        held = ((n, local(p.detach())) for n, p in self.parameters() if n in wanted)
        return {name: tensor.to(self.folder.spec.dtype_of(name, self.dtype)) for name, tensor in held}

    def write_weights(self, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: whole ones, by our names."""
        has_vision = self.folder.config.vision is not None
        if not self.lora:
            seen = processor_files(self.folder.path) if has_vision else ()
            copy_side_files(self.folder.path, target, SIDE_FILES + seen)
        elif has_vision:  # the adapter's folder alone then says in which sizes pictures were trained
            copy_side_files(self.folder.path, target, (PREPROCESSOR,))
        tokenizer, layout = self.plan.tokenizer_folder, self.plan.config.checkpoint.save_format
        copy_side_files(tokenizer, target, TOKENIZER_FILES)
        if tokenizer != self.folder.path:  # ends of answers are ids of the tokenizer
            copy_side_files(tokenizer, target, GENERATION_FILES)
        if self.lora:
            write_run_adapter(target, self.whole, self.lora, tensors, self.base_name, layout)
            if self.base and self.folder.files:  # a base from scratch is in no folder
                write_base(target, self.base, self.base_name)
            return
        config = self.folder.config
        dtype = tensors.write_files(target, "model") if isinstance(tensors, SavedTensors) else None
        if dtype is None:
            write_model(target, config, tensors.__getitem__, layout=layout, lasting=True)
        else:
            write_settings(target, config, layout, dtype)
            write_generation_config(target, config)

    def model_files(self) -> ModelFiles | None:
        """How all ranks together write the weights or the adapter; None: one rank does, whatever their size."""
        layout = self.plan.config.checkpoint.save_format
        if self.lora:
            return adapter_files(self.whole, self.lora, layout) if self.world.size > 1 else None
        return files_of(self.folder.config, layout)

    @torch.no_grad()
    def read_weights(self, source: Path) -> None:
        seed = self.plan.config.train.seed
        fill = weights.saved(source, self.whole, self.sharding, self.world.rank, self.lora is not None, seed)
        for name, param in self.parameters():
            if not self.lora or in_adapter(name):
                fill(name, local(param))
