"""Where compilers leave their kernels, so that the next run finds them: torch's, Triton's and CuTe's own default is a
folder under /tmp, which a container or a restart of the machine loses, or none at all. Called by pick(), before any of
them is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from erniekit.files.cache_folder import default_cache_dir

# Variable -> folder.
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUTE_DSL_CACHE_DIR": "cute",
    "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4",
}


# FlashAttention-4 keeps nothing unless this is 1.
FLASH4 = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def keep_kernels() -> None:
    """For this process and those it starts. Variables that are set already stay as they are."""
    os.environ.update(variables(os.environ))


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What to set; nothing where the folder cannot be written: then each compiler does as it would by itself."""
    missing = {name: subfolder for name, subfolder in FOLDERS.items() if name not in env}
    if "TORCHINDUCTOR_CACHE_DIR" in env:
        missing.pop("TRITON_CACHE_DIR", None)  # torch puts Triton's inside its own
    if not missing:
        return {}
    root = folder()
    try:
        root.mkdir(
            mode=0o700, parents=True, exist_ok=True
        )  # compiled code is loaded from here: writable by its owner only
    except (OSError, RuntimeError):
        return {}
    if not os.access(root, os.W_OK | os.X_OK):
        return {}
    found = {name: str(root / subfolder) for name, subfolder in missing.items()}
    return found if FLASH4 in env else {**found, FLASH4: "1"}


def folder() -> Path:
    """One for each version of torch and Python: all keep apart what their own versions made, none clears it away."""
    import torch

    return default_cache_dir() / "kernels" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
