"""The kernel that decides whether Triton is used at all is one that Triton compiles for a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.for_hopper import run_for_hopper

pytest.importorskip("triton", reason="the dev extra installs it on Linux")

COMPILED = """
from erniekit.devices.triton_probe import add_one

kinds = dict(zip(add_one.arg_names, ("*fp32", "*fp32", "i32")))
print("compiled", len(built(add_one, kinds, {add_one.arg_names[3]: 128})["cubin"]))
"""


def test_the_probe_compiles_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    assert run_for_hopper(COMPILED, tmp_path).startswith("compiled ")
