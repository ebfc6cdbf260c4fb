"""What signatures of kernels name."""

from __future__ import annotations

constexpr = int
