"""Times of a 0.3B training step on an NVIDIA card whose results are read at once, or one step late.

python benchmarks/steps.py
"""

from __future__ import annotations

import argparse
import time

import torch
from device_cases.steps import AtOnce, Training

from erniekit.models.config import DecoderConfig
from erniekit.train.step import TrainStep


def main() -> None:
    config = DecoderConfig(
        family="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_layers=18, num_heads=16,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
        max_positions=131072,
    )  # fmt: skip
    for length in (2048, 8192):
        for kind, name in ((AtOnce, "at once"), (TrainStep, "late")):
            run = Training(kind, config, steps=4, length=length)
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
