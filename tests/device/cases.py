"""Runs the tests of a device script one by one, without pytest: a failure is a line, and the rest goes on."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import torch


def run_all(names: dict[str, Any]) -> None:
    """All functions called test_..., with every set of values their mark gives; exits with 1 if any failed."""
    failed = 0
    for name, test in [(n[5:], f) for n, f in names.items() if n.startswith("test_")]:
        marks = [mark.args[1] for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        for values in marks[0] if marks else [()]:
            case = values if isinstance(values, tuple) else (values,)
            began = time.perf_counter()
            try:
                test(*case)
                torch.cuda.synchronize()
                print(f"ok    {name} {case or ''} {time.perf_counter() - began:.1f} s", flush=True)
            except Exception as error:
                failed += 1
                first = (str(error).splitlines() or [""])[0][:300]
                places = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
                print(
                    f"FAIL  {name} {case or ''}: {type(error).__name__}: {first} [{' '.join(places[-4:])}]", flush=True
                )
            torch.cuda.empty_cache()
    sys.exit(bool(failed))
