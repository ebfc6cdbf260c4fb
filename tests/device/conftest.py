"""Tests here share their inputs with the scripts of benchmarks/: benchmarks/device_cases."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
