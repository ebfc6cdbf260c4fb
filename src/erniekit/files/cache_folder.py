"""Where erniekit keeps what it need not do twice: tokens, features, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    return Path(os.environ.get("ERNIEKIT_CACHE") or Path.home() / ".cache" / "erniekit")
