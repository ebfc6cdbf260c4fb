"""PEFT's expert adapters through unsloth-zoo's grouped products: the same adapters as `peft`. Listed in PEERS.

The package insists on `unsloth` when it is imported whole; its expert path does not need it, so only that is
loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from erniekit.bench.peers.peft import Peft
from erniekit.bench.runner import Patch

ROOT = "unsloth_zoo"
PATCHES = f"{ROOT}.temporary_patches"


class Unsloth(Peft):
    name = "unsloth"
    _patch: ClassVar[Patch | None] = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """It replaces the forward of transformers' experts and of PEFT's parameter wrapper, for the whole process."""
        from peft.tuners.lora.layer import ParamWrapper
        from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeExperts

        # One for all that inherit: it patches once a process.
        patch = Unsloth._patch = Unsloth._patch or Patch((Ernie4_5_MoeExperts, "forward"), (ParamWrapper, "forward"))
        with patch.on(lambda: expert_path("ernie4_5_moe").patch_ernie4_5_moe()):
            yield


def expert_path(name: str) -> Any:
    """A module of its patches, the package around it replaced by a bare one."""
    if PATCHES in sys.modules:
        return importlib.import_module(f"{PATCHES}.{name}")
    found = find_spec(ROOT)
    assert found is not None
    assert found.origin is not None
    os.environ.setdefault("UNSLOTH_IS_PRESENT", "1")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"))
    home = Path(found.origin).parent
    root = _bare_package(ROOT, home)
    # What its own start would have found out about the machine.
    vars(root).update(DEVICE_TYPE="cuda", DEVICE_TYPE_TORCH="cuda", DEVICE_COUNT=1, ALLOW_PREQUANTIZED_MODELS=False)
    _bare_package(PATCHES, home / "temporary_patches")
    return importlib.import_module(f"{PATCHES}.{name}")


def _bare_package(name: str, folder: Path) -> ModuleType:
    """A package whose modules can be imported without running its own __init__."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package
    return package
