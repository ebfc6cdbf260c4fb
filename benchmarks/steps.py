"""Times of a 0.3B training step on an NVIDIA card whose results are read at once, or one step late.

python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import time

import torch
from device_cases.steps import ERNIE_03B, AtOnce, Training

from erniekit.train.step import TrainStep


def main() -> None:
    for length in (2048, 8192):
        for kind, name in ((AtOnce, "at once"), (TrainStep, "late")):
            run = Training(kind, ERNIE_03B, steps=4, length=length)
            run.fit()
            torch.cuda.synchronize()
            run.trainer.max_steps = 16
            began = time.perf_counter()
            run.fit()
            torch.cuda.synchronize()
            took = (time.perf_counter() - began) / 12
            print(f"  0.3B eager, 1 x {length}: {took * 1e3:6.1f} ms a step, results {name}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
